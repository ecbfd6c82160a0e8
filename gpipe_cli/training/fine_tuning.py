"""A run that begins with the weights of another one (paper section 4: ImageNet's AmoebaNet-B on eight other data sets).

All but the classifier is taken; the classifier is drawn anew where the classes are others, and the training begins at
its first step, with a fresh optimizer. The averaged weights are taken where the other run has any: they are what it was
evaluated on. Names are global, so the number of partitions means nothing, there as here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.classifier import classifier_of
from gpipe_cli.config.dataset import DatasetConfig, ImagesConfig
from gpipe_cli.config.model import CustomConfig
from gpipe_cli.config.settings import TrainConfig, load
from gpipe_cli.planner.placement import Placement
from gpipe_cli.training.checkpoint.restore import DTYPES
from gpipe_cli.training.checkpoint.same_model import OtherModelError, Shapes, refuse_other_shapes
from gpipe_cli.training.checkpoint.store import (
    DamagedError,
    check_files,
    find_checkpoint,
    heads,
    read_index,
    read_tensors,
    select,
)
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import Notes
from gpipe_cli.units import count, plural


@dataclass(frozen=True)
class Taking:
    """What is taken from a checkpoint, by global names of tensors, and what of the model stays new."""

    checkpoint: Path
    step: int
    averaged: bool
    taken: frozenset[str]
    new: frozenset[str]


def fine_tune(config: TrainConfig, engine: Engine, model: nn.Sequential, checkpoint: Path | None) -> Notes:
    """Put the weights of a checkpoint of `init_from` into the stages of this process; `model` has the shapes of all
    layers.

    A run that is resumed has its weights already: nothing is taken then. Returns what the banner says of what was taken
    and of what is frozen. Raises ValueError as `find_taking` does.
    """
    frozen = frozen_facts(engine.placement)
    if config.init_from is None or config.resume is not None or checkpoint is None:
        return frozen
    taking = find_taking(config, model, checkpoint)
    for k, stage in engine.stages.items():
        tensors = read_tensors(taking.checkpoint, engine.placement.layer_names[k], ("model", "ema"))
        values = select(tensors, "model") | select(tensors, "ema")  # averages are of what is floating-point only
        state = stage.module.state_dict()
        with torch.no_grad():
            for name in state.keys() & taking.taken:
                state[name].copy_(values[name])
            if k in engine.averages:
                for name, average in engine.averages[k].average.items():
                    average.copy_(state[name])
    return (*_taken_facts(config, taking, engine.placement), *frozen)


def find_weights(config: TrainConfig, warn: Callable[[str], None]) -> Path:
    """The checkpoint that `init_from` means: its best one, or if that is damaged the newest one that is not; `warn` is
    called with a line then.

    Raises ValueError, one line, as `find_taking` does, or if there is none.
    """
    assert config.init_from is not None
    model = build_model(config)

    def check(checkpoint: Path) -> None:
        find_taking(config, model, checkpoint)
        check_files(checkpoint, read_index(checkpoint).files)

    return find_checkpoint(Path(config.init_from), "best", "init_from", check, warn)


def find_taking(config: TrainConfig, model: nn.Sequential, checkpoint: Path) -> Taking:
    """What `init_from` and `init_head` mean for `model`, from names, dtypes and shapes alone.

    Raises ValueError, one line: a checkpoint of another architecture (and which names or shapes differ), or a
    classifier that shall be kept and does not fit; and DamagedError for one that is not whole.
    """
    assert config.init_from is not None
    source = load(Path(config.init_from))
    index = read_index(checkpoint)
    found = heads(checkpoint, index.files)
    there = {name.removeprefix("model/"): shape for name, (_, shape) in found.items() if name.startswith("model/")}
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    classifier = classifier_of(config, model)
    _check_names(config, source, checkpoint, index.layers, here, there, classifier)
    absent = frozenset(name for name in here if _layer(name) not in index.layers)  # a second classifier
    shared = here.keys() - classifier - absent
    refuse_other_shapes(f"init_from={config.init_from}", config, source, here, there, sorted(shared))
    unfit = sorted(name for name in classifier - absent if there.get(name) != here[name])
    if unfit and config.init_head == "keep":
        raise ValueError(
            f"init_head=keep: {unfit[0]} has shape {there.get(unfit[0], 'none')} in {config.init_from} and "
            f"{here[unfit[0]]} here; use init_head=new, or the same classes"
        )
    same = not unfit and _identity(source.dataset) == _identity(config.dataset)
    kept = config.init_head == "keep" or (config.init_head == "auto" and same)
    new = absent if kept else absent | classifier
    taken = frozenset(here.keys() - new)
    averaged = index.progress.ema_updates > 0
    for name, tensor in model.state_dict().items():
        own, wanted = (f"model/{name}", f"ema/{name}"), (DTYPES.get(tensor.dtype), tuple(tensor.shape))
        for key in own[: 2 if averaged and tensor.is_floating_point() else 1] if name in taken else ():
            if (there_is := found.get(key)) != wanted:
                raise DamagedError(f"{checkpoint}: {key} is {there_is or 'missing'}, the model has {wanted}")
    return Taking(checkpoint, index.progress.step, averaged, taken, frozenset(new))


def frozen_facts(placement: Placement) -> Notes:
    """The banner's line about what is not trained; none if everything is."""
    frozen = placement.frozen
    if not frozen.modules and not frozen.parameters:
        return ()
    layers = [name for names in placement.layer_names for name in names]
    whole = sum(name in frozen.modules for name in layers)
    every = sum(placement.parameters)
    fact = f"{whole} of {plural(len(layers), 'layer')}, "
    fact += f"{count(every - sum(placement.trained))} of {count(every)} parameters"
    idle = [str(k) for k, trained in enumerate(placement.trained) if not trained]
    if idle:
        fact += f"; {'stage' if len(idle) == 1 else 'stages'} {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} "
        fact += "nothing to train"
    return (("frozen", fact),)


def _taken_facts(config: TrainConfig, taking: Taking, placement: Placement) -> Notes:
    taken, new = _layers_of(taking.taken), _layers_of(taking.new)
    layers = [name for names in placement.layer_names for name in names]
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
        raise OtherModelError(f"init_from={config.init_from}", checkpoint, only_here, only_there, config, source)


def _identity(dataset: DatasetConfig) -> tuple[object, ...]:
    """Equal for two data sets with the same classes: of one's own files also where they are."""
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
