"""pipeline.html inside a notebook: an object that Jupyter displays, of text alone, so that no IPython is needed."""

import html
from dataclasses import dataclass, field
from pathlib import Path

from gpipe_cli.errors import InputError
from gpipe_cli.reporting.page.page import PAGE
from gpipe_cli.system.files import read_text

# A notebook has other text around the page, and is narrow. The rule is added here and not to page.css, so that it
# also holds in pages that were written before.
_LANES_ONLY = """<style>
header,#intro,#questions,#controls,#order,#shares,#words,main>section:has(#shares,#words),
main>p.pale,#numbers small{display:none!important}
#columns{display:block!important}
#numbers{grid-template-columns:repeat(auto-fit,minmax(130px,1fr))!important}
body{margin:0!important;padding:0 4px!important}
</style>"""


@dataclass(frozen=True)
class InlinePage:
    """A page in a frame: its styles do not affect the notebook, and its scripts, of a run that may come from elsewhere,
    have no access to the notebook or its server."""

    source: str = field(repr=False)  # HTML of a whole document; Jupyter also saves the repr
    height: int  # pixels

    def _repr_html_(self) -> str:
        # without allow-same-origin; a schedule that was edited is saved as a download
        frame = 'sandbox="allow-scripts allow-downloads" style="width:100%;border:0" title="timelines of the stages"'
        return f'<iframe srcdoc="{html.escape(self.source)}" height="{self.height}" {frame}></iframe>'


def inline_page(folder: Path, height: int, whole: bool) -> InlinePage:
    """The implementation of `gpipe_cli.show`, which documents the arguments and errors."""
    path = folder if folder.name == PAGE else folder / PAGE
    if not path.parent.is_dir():
        raise InputError(f"{folder}: there is no such folder; give a run's or a plan's, such as outputs/my_run")
    try:
        source = read_text(path)
    except FileNotFoundError:
        why = "a run writes it when an epoch ends, gpipe plan always"
        raise InputError(f"{path.parent}: has no {PAGE} ({why}); give the folder of such a run or plan") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); fix that, or run into a new folder") from error
    if not whole:
        source = source.replace("</head>", f"{_LANES_ONLY}\n</head>", 1)
    return InlinePage(source, height)
