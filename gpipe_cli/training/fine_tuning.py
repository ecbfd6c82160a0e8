"""A run that begins with the weights of another one (paper section 4: ImageNet's AmoebaNet-B on eight other data sets).

All but the classifier is taken; the classifier is drawn anew where the classes are others, and the training begins at
its first step, with a fresh optimizer. The averaged weights are taken where the other run has any: they are what it was
evaluated on. Names are global, so the number of partitions means nothing, there as here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gpipe_cli.config import TrainConfig, load
from gpipe_cli.dataset_settings import DatasetConfig, ImagesConfig, TextConfig
from gpipe_cli.model_settings import CustomConfig, choice_of
from gpipe_cli.reporting.units import count, plural
from gpipe_cli.training.build import build_model
from gpipe_cli.training.checkpoint import find_checkpoint, read_index, read_tensors, select
from gpipe_cli.training.classifier import classifier_of
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.layout import Layout
from gpipe_cli.training.team import Team
from gpipe_cli.typed import show

Facts = tuple[tuple[str, str], ...]  # of the banner: label, fact
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Taking:
    """What is taken from a checkpoint, by global names of tensors, and what of the model stays new."""

    checkpoint: Path
    step: int
    averaged: bool
    taken: frozenset[str]
    new: frozenset[str]


def fine_tune(config: TrainConfig, engine: Engine, team: Team, model: nn.Sequential) -> Facts:
    """Put the weights that `init_from` names into the stages of this process; `model` has the shapes of all layers.

    A run that is resumed has its weights already: nothing is taken then. Returns what the banner says of what was taken
    and of what is frozen. Raises ValueError as `find_taking` does.
    """
    frozen = frozen_facts(engine.layout)
    if config.init_from is None or config.resume is not None:
        return frozen
    # decided once for all: the other run may still be training, and have another best checkpoint a moment later
    taking = team.collect(find_taking(config, model) if team.leads else None)[0]
    for k, stage in engine.stages.items():
        tensors = read_tensors(taking.checkpoint, engine.layout.layer_names[k], ("model", "ema"))
        values = select(tensors, "model") | select(tensors, "ema")  # averages are of what is floating-point only
        state = stage.module.state_dict()
        with torch.no_grad():
            for name in state.keys() & taking.taken:
                state[name].copy_(values[name])
            if k in engine.averages:
                for name, average in engine.averages[k].average.items():
                    average.copy_(state[name])
    return (*_taken_facts(config, taking, engine.layout), *frozen)


def check_init_from(config: TrainConfig) -> None:
    """Raises ValueError as `find_taking` does, before any process is started."""
    find_taking(config, build_model(config))


def find_taking(config: TrainConfig, model: nn.Sequential) -> Taking:
    """What `init_from` and `init_head` mean for `model`, from names and shapes alone.

    Raises ValueError, one line: no checkpoint, one of another architecture (and which names or shapes differ), or a
    classifier that shall be kept and does not fit.
    """
    assert config.init_from is not None
    source = load(Path(config.init_from))
    checkpoint = find_checkpoint(Path(config.init_from), "best", "init_from")
    index = read_index(checkpoint)
    there = _shapes_in(checkpoint, index)
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    classifier = classifier_of(config, model)
    _check_names(config, source, checkpoint, index["layers"], here, there, classifier)
    absent = frozenset(name for name in here if _layer(name) not in index["layers"])  # a second classifier
    _check_shapes(config, source, here, there, classifier | absent)
    unfit = sorted(name for name in classifier - absent if there.get(name) != here[name])
    if unfit and config.init_head == "keep":
        raise ValueError(
            f"init_head=keep: {unfit[0]} has shape {there.get(unfit[0], 'none')} in {config.init_from} and "
            f"{here[unfit[0]]} here; use init_head=new, or the same classes"
        )
    same = not unfit and _identity(source.dataset) == _identity(config.dataset)
    kept = config.init_head == "keep" or (config.init_head == "auto" and same)
    new = absent if kept else absent | classifier
    averaged = any(name.startswith("ema/") for file in index["files"] for name in file["tensors"])
    return Taking(checkpoint, index["step"], averaged, frozenset(here.keys() - new), frozenset(new))


def frozen_facts(layout: Layout) -> Facts:
    """The banner's line about what is not trained; none if everything is."""
    frozen = layout.frozen
    if not frozen.modules and not frozen.parameters:
        return ()
    layers = [name for names in layout.layer_names for name in names]
    whole = sum(name in frozen.modules for name in layers)
    every = sum(layout.parameters)
    fact = f"{whole} of {plural(len(layers), 'layer')}, "
    fact += f"{count(every - sum(layout.trained))} of {count(every)} parameters"
    idle = [str(k) for k, trained in enumerate(layout.trained) if not trained]
    if idle:
        fact += f"; {'stage' if len(idle) == 1 else 'stages'} {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} "
        fact += "nothing to train"
    return (("frozen", fact),)


def _taken_facts(config: TrainConfig, taking: Taking, layout: Layout) -> Facts:
    taken, new = _layers_of(taking.taken), _layers_of(taking.new)
    layers = [name for names in layout.layer_names for name in names]
    parts = [layer for layer in layers if layer in taken & new]
    fact = plural(len(taken - new), "layer") + (f" and part of {', '.join(parts)}" if parts else "")
    fact += f" from {config.init_from} (best, step {taking.step}{', averaged weights' if taking.averaged else ''})"
    fresh = [layer for layer in layers if layer in new - taken]
    inside = sorted({name.rpartition(".")[0] for name in taking.new if _layer(name) in parts})
    said = [f"{plural(len(fresh), 'layer')}: {', '.join(fresh)}"] if fresh else []
    said += [", ".join(inside)] if inside else []
    return (("taken", fact), ("new", "; ".join(said) or "nothing, the classifier is that run's"))


def _check_names(
    config: TrainConfig,
    source: TrainConfig,
    checkpoint: Path,
    layers_there: Sequence[str],
    here: Shapes,
    there: Shapes,
    classifier: frozenset[str],
) -> None:
    """Raises ValueError if the layers are others, or the tensors in them.

    What may be on one side only is a second classifier in the middle, AmoebaNet's auxiliary head.
    """
    layers_here = list(dict.fromkeys(map(_layer, here)))
    layers_there = [layer for layer in layers_there if layer in {_layer(name) for name in there}]
    extra = _layers_of(classifier) - {layers_here[-1]}
    only_here = [layer for layer in layers_here if layer not in layers_there and layer not in extra]
    only_there = [layer for layer in layers_there if layer not in layers_here]
    if only_there and type(source.model) is type(config.model) and not isinstance(source.model, CustomConfig):
        extra = _layers_of(classifier_of(source, build_model(source))) - {layers_there[-1]}
        only_there = [layer for layer in only_there if layer not in extra]
    if not only_here and not only_there:  # then look inside
        both = {*layers_here} & {*layers_there}
        only_here = [name for name in here if _layer(name) in both and name not in there and name not in classifier]
        only_there = [name for name in there if _layer(name) in both and name not in here]
    if only_here or only_there:
        raise ValueError(
            f"init_from={config.init_from}: {checkpoint.name} is of another model (only here: {_some(only_here)}; only "
            f"there: {_some(only_there)}); {_as_there(config, source)}"
        )


def _check_shapes(
    config: TrainConfig, source: TrainConfig, here: Shapes, there: Shapes, without: frozenset[str]
) -> None:
    """Raises ValueError if tensors of the same name, but for those in `without`, have other shapes."""
    other = [name for name in here if name not in without and here[name] != there[name]]
    if not other:
        return
    name = other[0]
    why = f"; {len(other) - 1} more differ" if len(other) > 1 else ""
    remedy = _as_there(config, source)
    dataset, other_dataset = config.dataset, source.dataset
    if (
        isinstance(other_dataset, TextConfig)
        and isinstance(dataset, TextConfig)
        and (there[name][:1], here[name][:1]) == ((other_dataset.vocabulary,), (dataset.vocabulary,))
    ):
        why = ": with another vocabulary every token means something else"
        remedy = f"use dataset.vocabulary={other_dataset.vocabulary}, and text is read with the vocabulary of that run"
    elif isinstance(other_dataset, ImagesConfig) and other_dataset.image_size != getattr(dataset, "image_size", None):
        remedy = f"use dataset.image_size={other_dataset.image_size}, or a model that takes any size"
    raise ValueError(
        f"init_from={config.init_from}: {name} has shape {there[name]} there and {here[name]} here{why}; {remedy}"
    )


def _as_there(config: TrainConfig, source: TrainConfig) -> str:
    """Which settings of the model make it that of `source`."""
    if choice_of(config.model) != choice_of(source.model):
        return f"use model={choice_of(source.model)}, as there"
    here = asdict(config.model)
    other = [f"model.{key}={show(value)}" for key, value in asdict(source.model).items() if here.get(key) != value]
    return f"use {' '.join(other)}, as there" if other else "give the model's settings as they were there"


def _shapes_in(checkpoint: Path, index: dict[str, Any]) -> Shapes:
    """The shapes of a checkpoint's `model/` tensors, from the heads of its files."""
    shapes: Shapes = {}
    for file in index["files"]:
        path = checkpoint / file["name"]
        try:
            with safe_open(path, framework="pt") as opened:
                for name in file["tensors"]:
                    if name.startswith("model/"):
                        shapes[name.removeprefix("model/")] = tuple(opened.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not readable as safetensors ({error}); use another run") from error
    return shapes


def _identity(dataset: DatasetConfig) -> tuple[object, ...]:
    """What tells whether two data sets have the same classes: of one's own files also where they are."""
    own = dataset.name in ("image_folder", "text_files", "parallel_text")
    place = Path(dataset.root).resolve() if own and dataset.root is not None else None
    classes = (
        (dataset.num_classes, dataset.classes)
        if isinstance(dataset, ImagesConfig)
        else (dataset.vocabulary, dataset.direction)
    )
    return (dataset.name, *classes, place)


def _layers_of(names: frozenset[str]) -> set[str]:
    return {_layer(name) for name in names}


def _layer(name: str) -> str:
    return name.partition(".")[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "") if names else "none"
