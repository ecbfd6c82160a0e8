"""Whether a checkpoint is of the model that a run has; if not, what differs, and which settings would make it so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from gpipe_cli.config.dataset import ImagesConfig, TextConfig
from gpipe_cli.config.model import choice_of
from gpipe_cli.config.settings import TrainConfig, load
from gpipe_cli.config.typed import show
from gpipe_cli.training.checkpoint.store import DamagedError, Head, Index, heads, read_index

Shapes = Mapping[str, tuple[int, ...]]

# As the head of a safetensors file calls them.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A checkpoint beside the model of a run, by names, types and shapes alone.

    `setting` led to it, as it was given; `source` are the settings of the run that wrote it. Every `refuse` raises
    ValueError, one line.
    """

    setting: str
    checkpoint: Path
    config: TrainConfig
    source: TrainConfig
    index: Index
    heads: Mapping[str, Head]  # of everything in the checkpoint
    here: Shapes  # of the model
    there: Shapes

    @classmethod
    def of(cls, setting: str, run: Path, checkpoint: Path, config: TrainConfig, model: nn.Sequential) -> "Comparison":
        """`model` is on the meta device. Raises DamagedError if the checkpoint cannot be read."""
        index = read_index(checkpoint)
        found = heads(checkpoint, index.files)
        here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        there = {name.removeprefix("model/"): shape for name, (_, shape) in found.items() if name.startswith("model/")}
        return cls(f"{setting}={run}", checkpoint, config, load(run), index, found, here, there)

    def refuse_other_names(self, only_here: Sequence[str], only_there: Sequence[str]) -> None:
        """If layers, or tensors in them, are on one side only."""
        if only_here or only_there:
            raise ValueError(
                f"{self.setting}: {self.checkpoint.name} is of another model (only here: {_some(only_here)}; only "
                f"there: {_some(only_there)}); {self._as_there()}"
            )

    def refuse_other_shapes(self, names: Iterable[str]) -> None:
        """If tensors of these names, which are on both sides, have other shapes there than here."""
        other = [name for name in names if self.here[name] != self.there[name]]
        if not other:
            return
        here, there = self.here[other[0]], self.there[other[0]]
        why = f"; {len(other) - 1} more differ" if len(other) > 1 else ""
        remedy = self._as_there()
        mine, theirs = self.config.dataset, self.source.dataset
        if (
            isinstance(mine, TextConfig)
            and isinstance(theirs, TextConfig)
            and (there[:1], here[:1]) == ((theirs.vocabulary,), (mine.vocabulary,))
        ):
            why = ": with another vocabulary every token means something else"
            remedy = f"use dataset.vocabulary={theirs.vocabulary}, and text is read with the vocabulary of that run"
        elif isinstance(theirs, ImagesConfig) and theirs.image_size != getattr(mine, "image_size", None):
            remedy = f"use dataset.image_size={theirs.image_size}, or a model that takes any size"
        raise ValueError(f"{self.setting}: {other[0]} has shape {there} there and {here} here{why}; {remedy}")

    def refuse_damaged(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """If the checkpoint lacks one of these tensors, or has it with another type or shape: as DamagedError."""
        for name, tensor in wanted.items():
            head = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
            if (found := self.heads.get(name, "missing")) != head:
                raise DamagedError(f"{self.checkpoint}: {name} is {found}, the run needs {head}")

    def _as_there(self) -> str:
        """Which settings of the model, or of the classes that it tells apart, make it that of `source`."""
        if choice_of(self.config.model) != choice_of(self.source.model):
            return f"use model={choice_of(self.source.model)}, as there"
        here, there = asdict(self.config), asdict(self.source)
        for group, keys in (("model", there["model"]), ("dataset", ("num_classes", "classes"))):
            mine, theirs = here[group], there[group]
            other = [f"{group}.{key}={show(theirs.get(key))}" for key in keys if mine.get(key) != theirs.get(key)]
            if other:
                return f"use {' '.join(other)}, as there"
        return "give the model's settings as they were there"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "") if names else "none"
