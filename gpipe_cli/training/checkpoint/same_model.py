"""Whether a checkpoint is of the model that a run has; if not, what differs, and which settings would make it so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from gpipe_cli.config.dataset import ImagesConfig, TextConfig
from gpipe_cli.config.model import choice_of
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import show

Shapes = Mapping[str, tuple[int, ...]]


class OtherModelError(ValueError):
    """The layers of a checkpoint, or the tensors in them, are others than those of the run."""

    def __init__(
        self,
        setting: str,
        checkpoint: Path,
        only_here: Sequence[str],
        only_there: Sequence[str],
        config: TrainConfig,
        source: TrainConfig,
    ) -> None:
        """`setting` led to the checkpoint, as it was given; `source` are those of its run."""
        super().__init__(
            f"{setting}: {checkpoint.name} is of another model (only here: {_some(only_here)}; only there: "
            f"{_some(only_there)}); {_as_there(config, source)}"
        )


def refuse_other_shapes(
    setting: str, config: TrainConfig, source: TrainConfig, here: Shapes, there: Shapes, names: Iterable[str]
) -> None:
    """Raises ValueError if tensors of these names, which are on both sides, have other shapes there than here."""
    other = [name for name in names if here[name] != there[name]]
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
    raise ValueError(f"{setting}: {name} has shape {there[name]} there and {here[name]} here{why}; {remedy}")


def _as_there(config: TrainConfig, source: TrainConfig) -> str:
    """Which settings of the model, or of the classes that it tells apart, make it that of `source`."""
    if choice_of(config.model) != choice_of(source.model):
        return f"use model={choice_of(source.model)}, as there"
    here, there = asdict(config), asdict(source)
    for group, keys in (("model", there["model"]), ("dataset", ("num_classes", "classes"))):
        values = {key: there[group].get(key) for key in keys}
        if other := [f"{group}.{key}={show(value)}" for key, value in values.items() if here[group].get(key) != value]:
            return f"use {' '.join(other)}, as there"
    return "give the model's settings as they were there"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "") if names else "none"
