"""The notebooks of recipes/notebooks run as they are shipped, and with the solutions of their exercises.

A solution lies in the metadata of the cell that has its stub. Each cell is run once: the stub, a wrong answer and
the solution of an exercise follow each other, each with the check below it.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="no nbformat: pip install -e '.[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="no ipykernel: pip install -e '.[notebooks]'")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "recipes" / "notebooks").glob("*.ipynb"))
MINUTES = 5  # that a notebook may take on two cores, in any of its cells
WRONG = {
    "1a": "def running(tick, partitions, micro_batches):\n    return [(k, tick) for k in range(partitions)]",
    "1b": "def bubble(partitions, micro_batches):\n    return (partitions - 1) / micro_batches",
    "1c": "enough = 4",
    "2a": "one_f_one_b = fill_drain",
    "2b": "least_memory = one_f_one_b",
    "2c": "mended = deadlock",
    "3a": "def kept(samples, micro_batches, width):\n    return samples * width * 4",
    "3b": "recomputed = kept",
    "3c": 'mode = "never"',
    "4a": 'causes = dict.fromkeys("ABC", "bubble")',
    "4b": 'cure_a = "batch_size=128"',
    "4c": 'cure_b = "micro_batches=8"',
    "4d": 'cure_c = "micro_batches=2"',
    "5a": "def bound(partitions, micro_batches):\n    return partitions / 2",
    "5b": "above = set()",
    "5c": "nearest = {2: 4, 4: 4, 8: 4}",
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def exercises(notebook: Any) -> Iterator[tuple[Any, Any, str]]:
    """The cell of each stub, the cell of its check, and the exercise's name."""
    for stub, check in zip(notebook.cells, notebook.cells[1:], strict=False):
        if "solution" in stub.metadata:
            yield stub, check, re.findall(r'^check\("(\w+)", ', check.source)[0]


@pytest.mark.slow
def test_every_cell_runs_and_every_check_tells_right_from_wrong(tmp_path: Path) -> None:
    """Of all notebooks, one after another in one kernel, which forgets every name between them: to start one and
    import torch takes as long as the cells."""
    folder = tmp_path / "recipes"  # a copy, so that outputs are not left in the repository
    shutil.copytree(ROOT / "recipes", folder, ignore=shutil.ignore_patterns("pictures", "measurements", "outputs"))
    together, names = nbformat.v4.new_notebook(), []
    notebooks = [read(path) for path in NOTEBOOKS]
    for notebook in notebooks:
        for stub, check, name in [*exercises(notebook)]:
            at = notebook.cells.index(check) + 1
            answers = [nbformat.v4.new_code_cell(source) for source in (WRONG[name], stub.metadata["solution"])]
            notebook.cells[at:at] = [one for cell in answers for one in (cell, nbformat.v4.new_code_cell(check.source))]
            names.append(name)
        together.cells += [*notebook.cells, nbformat.v4.new_code_cell("%reset -f")]
    where = {"metadata": {"path": str(folder / "notebooks")}}
    nbclient.NotebookClient(together, timeout=60 * MINUTES, kernel_name="python3", resources=where).execute()
    printed = "".join(
        output.text
        for cell in together.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    answered = re.findall(r"^exercise (\w+): (not answered yet|not yet|right)", printed, re.MULTILINE)
    assert answered == [(name, word) for name in names for word in ("not answered yet", "not yet", "right")], printed
    for path, notebook in zip(NOTEBOOKS, notebooks, strict=True):
        shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        assert any("<iframe srcdoc=" in one.data.get("text/html", "") for one in shown) or path.stem == "5_table_2"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_shipped_with_what_its_cells_print(path: Path) -> None:
    """All but pages, a quarter of a megabyte each, and the times of the machine that ran them."""
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all((cell.execution_count is None) == (cell.metadata.get("tags") == ["not-stored"]) for cell in code)
    assert {output.output_type for cell in code for output in cell.outputs} == {"stream"}
    assert all("not answered yet" in check.outputs[0].text for _, check, _ in exercises(notebook))
    assert path.stat().st_size < 20_000
    assert notebook.metadata.kernelspec.name == "python3"
    assert not re.search(r"/(home|root|work|tmp)/", path.read_text(encoding="utf-8"))
