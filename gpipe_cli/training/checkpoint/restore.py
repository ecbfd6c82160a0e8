"""Between a pipeline and a checkpoint: whether it fits the model, and which tensors each stage saves and restores.

Law 3: resumed with any cut, the weights end up bit-identical.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe_cli.assembly.optimizer import load_optimizer_state, optimizer_state, state_of
from gpipe_cli.config.groups import TEXT_DATASETS, ImagesConfig, TextConfig, group_choice
from gpipe_cli.config.settings import TrainConfig, fallback_values, read_config
from gpipe_cli.errors import InputError, InvalidSettingError, format_value
from gpipe_cli.pipeline.runtime.tied_weights import canonical_names, find_ties
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.training.checkpoint import files
from gpipe_cli.training.data_feed import TOKENIZER
from gpipe_cli.training.engine import Engine
from gpipe_cli.units import first_few


class CheckpointCompatibility:
    """Whether a checkpoint fits the model of a run, by names, types and shapes alone.

    Every `check` method raises InputError.
    """

    def __init__(self, setting: str, run: Path, checkpoint: Path, config: TrainConfig, model: nn.Sequential) -> None:
        """`setting` has named the `run` that wrote the checkpoint; `model` is on the meta device. Raises
        CorruptCheckpointError if the checkpoint cannot be read."""
        self.setting, self.checkpoint, self.config = f"{setting}={run}", checkpoint, config
        self.index = files.read_index(checkpoint)
        self.tensor_headers = files.tensor_headers(checkpoint, self.index.files)
        # shapes of the model's tensors, and of the checkpoint's `model/` tensors, by the same names
        self.shapes = {name: tuple(tensor.shape) for name, tensor in saved_state(model).items()}
        saved_names = [name for name in self.tensor_headers if name.startswith("model/")]
        self.saved_shapes = {name.removeprefix("model/"): self.tensor_headers[name][1] for name in saved_names}
        for name in canonical_names(find_ties(model)):  # earlier versions kept a tied weight under all its names
            self.saved_shapes.pop(name, None)
        self.source = read_config(run, fallback_values(config))  # settings of that run

    def check_same_names(self, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Check that no layer or tensor is only in the model, or only in the checkpoint."""
        if missing or unexpected:
            differences = f"only here: {_first_names(missing)}; only there: {_first_names(unexpected)}"
            why = f"{self.checkpoint.name} is of another model ({differences})"
            raise InputError(f"{self.setting}: {why}; {self._hint()}")

    def check_same_tokenizer(self) -> None:
        """Check that the settings name the tokenizer of the run, or the files that it saved."""
        mine, theirs = self.config.dataset, self.source.dataset
        if not isinstance(mine, TextConfig) or not isinstance(theirs, TextConfig):
            return
        if not TEXT_DATASETS[mine.name].tokenizer:
            return
        saved = files.run_folder_of(self.checkpoint) / TOKENIZER
        uses_saved = theirs.tokenizer is not None and mine.tokenizer is not None and Path(mine.tokenizer) == saved
        if mine.tokenizer == theirs.tokenizer or uses_saved:
            return
        whose, use = "its own vocabulary", "remove it"
        if theirs.tokenizer is not None:
            whose = f"the tokenizer {theirs.tokenizer}"
            use = f"use dataset.tokenizer={saved} dataset.vocabulary={theirs.vocabulary}"
        why = f"{self.setting} has {whose}, and with another every token means something else"
        raise InvalidSettingError("dataset.tokenizer", mine.tokenizer, f"{why}; {use}")

    def check_same_shapes(self, names: Iterable[str]) -> None:
        """Check that tensors of these names, which both have, have the same shapes."""
        different = [name for name in names if self.shapes[name] != self.saved_shapes[name]]
        if not different:
            return
        shape, saved_shape = self.shapes[different[0]], self.saved_shapes[different[0]]
        why = f"; {len(different) - 1} more differ" if len(different) > 1 else ""
        remedy = self._hint()
        mine, theirs = self.config.dataset, self.source.dataset
        if (
            isinstance(mine, TextConfig)
            and isinstance(theirs, TextConfig)
            and (saved_shape[:1], shape[:1]) == ((theirs.vocabulary,), (mine.vocabulary,))
        ):
            why = ": with another vocabulary every token means something else"
            remedy = f"use dataset.vocabulary={theirs.vocabulary}: text is then read with that run's vocabulary"
        elif isinstance(theirs, ImagesConfig) and theirs.image_size != getattr(mine, "image_size", None):
            remedy = f"use dataset.image_size={theirs.image_size}, or a model that takes any size"
        raise InputError(
            f"{self.setting}: {different[0]} has shape {saved_shape} there and {shape} here{why}; {remedy}"
        )

    def check_tensors(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Raises CorruptCheckpointError if the checkpoint lacks any of these tensors, or has it in another dtype or
        shape."""
        for name, tensor in wanted.items():
            needed = files.DTYPES.get(tensor.dtype), tuple(tensor.shape)
            if (saved := self.tensor_headers.get(name, "missing")) != needed:
                raise files.CorruptCheckpointError(f"{self.checkpoint}: {name} is {saved}, the run needs {needed}")

    def _hint(self) -> str:
        """The remedy: the settings of model and classes that must be as in `source`."""
        if group_choice(self.config.model) != group_choice(self.source.model):
            return f"use model={group_choice(self.source.model)}, as there"
        settings, source_settings = asdict(self.config), asdict(self.source)
        for group, keys in (("model", source_settings["model"]), ("dataset", ("num_classes", "classes"))):
            mine, theirs = settings[group], source_settings[group]
            other = [
                f"{group}.{key}={format_value(theirs.get(key))}" for key in keys if mine.get(key) != theirs.get(key)
            ]
            if other:
                return f"use {' '.join(other)}, as there"
        return "give the model's settings as they were there"


def _first_names(names: Sequence[str]) -> str:
    return first_few(names, 4) or "none"


def collect_stage_state(engine: Engine, stage: int) -> dict[str, torch.Tensor]:
    """The tensors of stage `stage` that a checkpoint contains, by global names; a tied weight is in its first stage."""
    module = engine.stages[stage].module
    elsewhere = canonical_names(engine.spec.ties)
    state = {f"model/{name}": tensor for name, tensor in module.state_dict().items() if name not in elsewhere}
    optimizer = optimizer_state(engine.optimizers[stage], engine.owned_parameters(stage))
    state |= {f"optimizer/{name}": tensor for name, tensor in optimizer.items()}
    if stage in engine.averages:
        averages = engine.averages[stage].average.items()
        state |= {f"ema/{name}": tensor for name, tensor in averages if name not in elsewhere}
    return state


def check_restorable(match: CheckpointCompatibility, model: nn.Sequential, *, optimizer: bool) -> None:
    """Check that a checkpoint has all tensors that a run with `model` (on the meta device, frozen as in the run) needs.

    Raises InputError, naming what differs, if it belongs to another model, and CorruptCheckpointError if a tensor is
    missing.
    """
    layers = dict(model.named_children())
    for names, saved_names in ((layers, match.index.layers), (match.shapes, match.saved_shapes)):
        missing = [name for name in names if name not in saved_names]
        unexpected = [name for name in saved_names if name not in names]
        match.check_same_names(missing, unexpected)
    match.check_same_tokenizer()
    match.check_same_shapes(match.shapes)
    state = saved_state(model)
    config = match.config
    wanted = {f"model/{name}": tensor for name, tensor in state.items()}
    if config.ema_decay and match.index.progress.ema_updates:
        wanted |= {f"ema/{name}": tensor for name, tensor in state.items() if tensor.is_floating_point()}
    for name, parameter in model.named_parameters() if optimizer else ():
        if parameter.requires_grad and name not in match.index.without_state:
            kept = state_of(config.optimizer, tuple(parameter.shape), parameter.dtype)
            wanted |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept.items()}
    match.check_tensors(wanted)


# Settings of a data set for its location or the form of its samples; tokenizers are compared by content.
_CHANGEABLE_SETTINGS = ("root", "cache", "download", "partial", "image_size", "augmentation", "tokenizer")


def check_same_data(config: TrainConfig, saved: TrainConfig) -> None:
    """Raises InvalidSettingError if the settings of the data set or of mini-batches are not those of the resumed run,
    `saved`: its position in the data, its targets or its scores would then mean something else."""
    before = _data_settings(saved)
    for setting, given in _data_settings(config).items():
        if given != (was := before.get(setting)):
            why = (
                f"the run that is resumed has {setting}={format_value(was)}, on which its position in the data depends"
            )
            raise InvalidSettingError(setting, given, f"{why}; remove the setting")


def _data_settings(config: TrainConfig) -> dict[str, Any]:
    of_dataset = asdict(config.dataset)
    fixed = {f"dataset.{key}": value for key, value in of_dataset.items() if key not in ("name", *_CHANGEABLE_SETTINGS)}
    of_batches = {"seed": config.seed, "batch_size": config.batch_size, "batch_tokens": config.batch_tokens}
    return {"dataset": of_dataset["name"], **fixed, **of_batches}


def check_optimizer_state(config: TrainConfig, saved: TrainConfig) -> None:
    """Raises InputError if the optimizer needs state that the optimizer of the resumed run (`saved`) did not keep."""
    needed, kept = (state_of(run.optimizer, (1,), torch.float32).keys() for run in (config, saved))
    if missing := sorted(needed - kept):
        raise InputError(
            f"optimizer={config.optimizer.name}: needs {', '.join(missing)} of every parameter, and the run that is "
            f"resumed was trained by {saved.optimizer.name} without; remove the optimizer's settings"
        )


def restore(engine: Engine, checkpoint: Path, *, optimizer: bool) -> None:
    """Copy the values of a checkpoint, written with any cut, into the stages of this process.

    Raises CorruptCheckpointError if it was damaged after it had been checked.
    """
    updates = files.read_index(checkpoint).progress.ema_updates
    intact = set[str]()
    for k, stage in engine.stages.items():
        kinds = ("model", "optimizer", "ema") if optimizer else ("model", "ema")
        tensors = stage_tensors(engine.spec, k, checkpoint, kinds, intact)
        _copy(stage.module.state_dict(), files.select(tensors, "model"))
        if k in engine.averages:
            average = engine.averages[k]
            average.updates = updates
            # without averages in the checkpoint, they start from its weights
            _copy(average.average, files.select(tensors, "ema") if updates else stage.module.state_dict())
        if optimizer:
            load_optimizer_state(engine.optimizers[k], engine.parameters[k], files.select(tensors, "optimizer"))


def stage_tensors(
    spec: PipelineSpec, stage: int, checkpoint: Path, kinds: Iterable[str], intact: set[str]
) -> dict[str, torch.Tensor]:
    """The tensors of a stage, of the given kinds; tied weights under all names that they have there. `intact` and
    errors as in `read_tensors`."""
    layers = set(spec.layer_names[stage])
    first = {tie.layers[0] for tie in spec.ties if layers.intersection(tie.layers)}
    tensors = files.read_tensors(checkpoint, layers | first, kinds, intact)
    renamed = canonical_names(spec.ties).items()
    saved_names = {f"{kind}/{name}": f"{kind}/{saved}" for kind in ("model", "ema") for name, saved in renamed}
    return tensors | {name: tensors[saved] for name, saved in saved_names.items() if saved in tensors}


def saved_state(model: nn.Sequential) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model by their names in a checkpoint, which contains a tied weight once."""
    elsewhere = canonical_names(find_ties(model))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in elsewhere}


def _copy(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        value = values[name]
        assert (value.shape, value.dtype) == (target.shape, target.dtype), name
        target.copy_(value)
