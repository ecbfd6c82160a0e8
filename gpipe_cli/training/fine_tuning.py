"""A run that begins with the weights of another run (paper section 4: ImageNet's AmoebaNet-B on eight other data sets).

All weights are loaded except the classifier's, which are initialized if the classes differ. Training begins at step 0
with a fresh optimizer. Averaged weights are loaded if the other run has any, as it was evaluated with them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.freezing import classifier_of
from gpipe_cli.config.groups import CustomConfig, DatasetConfig, ImagesConfig
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.images import same_classes
from gpipe_cli.errors import InputError
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.training.checkpoint.files import find_checkpoint, select
from gpipe_cli.training.checkpoint.restore import CheckpointCompatibility, saved_state, stage_tensors
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import Notes
from gpipe_cli.units import count, plural


def fine_tune(engine: Engine, checkpoint: Path | None, classes: Sequence[str] = ()) -> Notes:
    """Copy the weights of the checkpoint of `init_from` into this process's stages, unless the run is resumed.
    `classes`: their names in the data, () if it has none. Returns the banner's lines about loaded and frozen weights.
    Raises the errors of `match_pretrained`."""
    config = engine.config
    frozen = frozen_layers_note(engine.spec)
    if config.init_from is None or config.resume is not None or checkpoint is None:
        return frozen
    match, new = match_pretrained(config, engine.model, checkpoint, classes)
    intact = set[str]()
    for k, stage in engine.stages.items():
        tensors = stage_tensors(engine.spec, k, checkpoint, ("model", "ema"), intact)
        values = select(tensors, "model") | select(tensors, "ema")  # only floating-point tensors have averages
        state = stage.module.state_dict()
        with torch.no_grad():
            for name in state.keys() - new:
                state[name].copy_(values[name])
            if k in engine.averages:
                for name, average in engine.averages[k].average.items():
                    average.copy_(state[name])
    return (*_loaded_layers_note(match, new, engine.spec), *frozen)


def find_weights(config: TrainConfig, warn: Callable[[str], None]) -> Path:
    """The best checkpoint of the run `init_from`; if it is damaged, the newest intact, with a line to `warn`.

    Raises the errors of `match_pretrained`, and InputError if the run has no usable checkpoint.
    """
    assert config.init_from is not None
    check = partial(match_pretrained, config, build_model(config))
    return find_checkpoint(Path(config.init_from), "best", "init_from", check, warn)


def match_pretrained(
    config: TrainConfig, model: nn.Sequential, checkpoint: Path, classes: Sequence[str] | None = None
) -> tuple[CheckpointCompatibility, frozenset[str]]:
    """How a checkpoint matches `model`, and the names of the tensors that stay new under `init_from` and `init_head`;
    all others are loaded from the checkpoint. `classes`: their names in the data, in the other run's order where it has
    the same; (): they have none; None: not known yet, and assumed to be the same.

    Raises InputError for a checkpoint of another architecture (naming what differs) and for a classifier
    that does not fit under init_head=keep; CorruptCheckpointError for a checkpoint that lacks a tensor or cannot be
    read.
    """
    assert config.init_from is not None
    match = CheckpointCompatibility("init_from", Path(config.init_from), checkpoint, config, model)
    shapes, saved_shapes = match.shapes, match.saved_shapes
    classifier = classifier_of(config, model) & shapes.keys()  # a tied matrix is loaded with the embedding
    _check_same_names(match, classifier)
    absent = frozenset(name for name in shapes if _layer_name(name) not in match.index.layers)  # an auxiliary head
    match.check_same_tokenizer()
    match.check_same_shapes(sorted(shapes.keys() - classifier - absent))
    unfit = sorted(name for name in classifier - absent if saved_shapes.get(name) != shapes[name])
    if unfit and config.init_head == "keep":
        raise InputError(
            f"init_head=keep: {unfit[0]} has shape {saved_shapes.get(unfit[0], 'none')} in {config.init_from} and "
            f"{shapes[unfit[0]]} here; use init_head=new, or the same classes"
        )
    same = not unfit and _same_classes(match, classes)
    kept = config.init_head == "keep" or (config.init_head == "auto" and same)
    new = absent if kept else absent | classifier
    loaded = {name: tensor for name, tensor in saved_state(model).items() if name not in new}
    averages = loaded if match.index.progress.ema_updates else {}
    match.check_tensors({f"model/{name}": tensor for name, tensor in loaded.items()})
    match.check_tensors({f"ema/{name}": tensor for name, tensor in averages.items() if tensor.is_floating_point()})
    return match, new


def frozen_layers_note(spec: PipelineSpec) -> Notes:
    """The banner's line about frozen layers and parameters; () if nothing is frozen."""
    frozen = spec.frozen
    if not frozen.modules and not frozen.parameters:
        return ()
    layers = [name for names in spec.layer_names for name in names]
    whole = sum(name in frozen.modules for name in layers)
    every = sum(spec.parameters)
    fact = f"{whole} of {plural(len(layers), 'layer')}, "
    fact += f"{count(every - sum(spec.trained))} of {count(every)} parameters"
    idle = [str(k) for k, trained in enumerate(spec.trained) if not trained]
    if idle:
        fact += f"; {'stage' if len(idle) == 1 else 'stages'} {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} "
        fact += "nothing to train"
    return (("frozen", fact),)


def _loaded_layers_note(match: CheckpointCompatibility, new: frozenset[str], spec: PipelineSpec) -> Notes:
    """The banner's lines about loaded and new layers."""
    loaded_layers, new_layers = _layer_names(match.shapes.keys() - new), _layer_names(new)
    layers = [name for names in spec.layer_names for name in names]
    parts = [layer for layer in layers if layer in loaded_layers & new_layers]
    fact = plural(len(loaded_layers - new_layers), "layer") + (f" and part of {', '.join(parts)}" if parts else "")
    progress = match.index.progress
    best = "best, " if progress.best_step == progress.step else ""
    fact += f" from {match.config.init_from} ({best}step {progress.step}"
    fact += f"{', averaged weights' if progress.ema_updates else ''})"
    initialized_layers = [layer for layer in layers if layer in new_layers - loaded_layers]
    inside = sorted({name.rpartition(".")[0] for name in new if _layer_name(name) in parts})
    said = (
        [f"{plural(len(initialized_layers), 'layer')}: {', '.join(initialized_layers)}"] if initialized_layers else []
    )
    said += [", ".join(inside)] if inside else []
    return (("taken", fact), ("new", "; ".join(said) or "nothing, the classifier is that run's"))


def _check_same_names(match: CheckpointCompatibility, classifier: frozenset[str]) -> None:
    """Raises InputError if the names of layers or of their tensors differ; AmoebaNet's auxiliary head, a second
    classifier in the middle, may be missing in model or checkpoint."""
    names, saved_names = match.shapes.keys(), match.saved_shapes.keys()
    config, source = match.config, match.source
    layer_names, saved_layer_names = (
        list(dict.fromkeys(map(_layer_name, tensors))) for tensors in (names, saved_names)
    )
    extra = _layer_names(classifier) - {layer_names[-1]}
    missing = [layer for layer in layer_names if layer not in saved_layer_names and layer not in extra]
    unexpected = [layer for layer in saved_layer_names if layer not in layer_names]
    if unexpected and type(source.model) is type(config.model) and not isinstance(source.model, CustomConfig):
        extra = _layer_names(classifier_of(source, build_model(source))) - {saved_layer_names[-1]}
        unexpected = [layer for layer in unexpected if layer not in extra]
    if not missing and not unexpected:  # the same layers: compare their tensors
        common = {*layer_names} & {*saved_layer_names}
        missing = [n for n in names if _layer_name(n) in common and n not in saved_names and n not in classifier]
        unexpected = [n for n in saved_names if _layer_name(n) in common and n not in names]
    match.check_same_names(missing, unexpected)


def _same_classes(match: CheckpointCompatibility, classes: Sequence[str] | None) -> bool:
    """Whether outputs mean the same classes in the other run and here: by the names of the classes or, if either has
    none, by the data set."""
    saved = match.index.classes
    if classes is None or (classes and saved):
        return classes is None or same_classes(classes, saved or ())
    return _identity(match.source.dataset) == _identity(match.config.dataset)


def _identity(dataset: DatasetConfig) -> tuple[object, ...]:
    """A key that is equal for data sets with the same classes; for a user's own files it includes their folder."""
    of_user = dataset.name in ("image_folder", "image_masks", "text_files", "parallel_text")
    place = Path(dataset.root).resolve() if of_user and dataset.root is not None else None
    if isinstance(dataset, ImagesConfig):
        return dataset.name, dataset.num_classes, dataset.classes, place
    return dataset.name, dataset.vocabulary, dataset.direction, place


def _layer_names(names: Iterable[str]) -> set[str]:
    return {_layer_name(name) for name in names}


def _layer_name(name: str) -> str:
    return name.partition(".")[0]
