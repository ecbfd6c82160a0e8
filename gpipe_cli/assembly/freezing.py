"""From `freeze=...` to what is not trained. Paper section 4 fine-tunes everything; freezing is cheaper.

Patterns name layers, modules inside them or parameters. What is frozen is decided once, before the workers start, so
that every process freezes the same and every boundary knows whether gradients come back over it.
"""

from fnmatch import fnmatchcase

from torch import nn

from gpipe_cli.assembly.classifier import classifier_of
from gpipe_cli.config.settings import TAKEN, TrainConfig
from gpipe_cli.config.typed import nearest, show
from gpipe_cli.pipeline.runtime.frozen import Frozen


def find_frozen(config: TrainConfig, model: nn.Sequential) -> Frozen:
    """What `config.freeze` names in `model`.

    Raises ValueError, one line, for a pattern that matches nothing (with the nearest name), or if nothing is left to
    train.
    """
    patterns = config.freeze or ()
    every = [name for name, _ in model.named_modules() if name], [name for name, _ in model.named_parameters()]
    modules: set[str] = set()
    parameters: set[str] = set()
    for pattern in patterns:
        if pattern == TAKEN:
            whole, single = _all_but(classifier_of(config, model), model)
        else:
            whole, single = ([name for name in names if fnmatchcase(name, pattern)] for names in every)
        if not whole and not single:
            names = [name for names in every for name in names]
            hint = nearest(pattern, names) or f"; the layers are {', '.join(dict(model.named_children()))}"
            raise ValueError(f"freeze={show(patterns)}: no layer, module or parameter is called {pattern}{hint}")
        modules |= {*whole}
        parameters |= {*single}
    outermost = tuple(name for name in every[0] if name in modules and not _is_inside(name, modules))
    alone = tuple(name for name in every[1] if name in parameters and not _is_inside(name, modules))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in alone}
    if patterns and all(_is_inside(name, modules) for name in trained):
        layers = [name for name, _ in model.named_children()]
        raise ValueError(
            f"freeze={show(patterns)}: nothing is left to train; leave some layers out, at least {layers[-1]}, the last"
        )
    return Frozen(outermost, alone)


def _all_but(classifier: frozenset[str], model: nn.Sequential) -> tuple[list[str], list[str]]:
    """The largest modules that have tensors and none of the classifier's, and the parameters that are left over."""
    whole: list[str] = []
    single: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        prefix = f"{path}." if path else ""
        names = {f"{prefix}{name}" for name in module.state_dict()}
        if names and not names & classifier:
            whole.append(path)
        elif names:
            single.extend(
                f"{prefix}{name}"
                for name, _ in module.named_parameters(recurse=False)
                if f"{prefix}{name}" not in classifier
            )
            for name, child in module.named_children():
                visit(f"{prefix}{name}", child)

    visit("", model)
    return whole, single


def _is_inside(name: str, modules: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in modules for depth in range(1, len(parts)))
