"""Networks of timm by name, cut into layers: what the paper's fine-tuning (Section 4, Table 4) needs besides AmoebaNet.

timm knows some thousand networks and has weights for most; `chain` turns those of several families into layers. They
start as timm initialises them, which is written for whole models: unlike our own, such a model is built with memory.
"""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.config.typed import RefusedError, with_type
from gpipe_cli.models.chain import chain


def build_timm(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    dropout: float,
    drop_path: float,
    pretrained: bool = False,
    weights: str | None = None,
) -> nn.Sequential:
    """Build a network of timm as a chain of layers: images (N, 3, S, S) -> logits (N, num_classes).

    Initial values come from torch's default generator, the same ones as timm's own model gets. On the meta device the
    result has shapes only; ask for no weights there.

    Args:
        name: timm's name, with or without the tag of its weights: "resnet50", "resnet50.a1_in1k".
        num_classes: classes; a loaded classifier for another number is left out and starts anew.
        image_size: S, pixels; vision Transformers and MLP-Mixers are built for this size only.
        dropout: probability to drop a feature before the classifier.
        drop_path: probability to drop the last block's branch; earlier blocks less, in timm's way.
        pretrained: load timm's weights (from its cache or the network). `weights` comes first.
        weights: a file with tensors under timm's names, .safetensors or what torch.save writes.

    Raises:
        ValueError: an unknown name, a family without a chain, a setting that the model does not have, or weights that
            do not fit or cannot be had.
    """
    import timm

    settings = _settings(name, num_classes, image_size, dropout, drop_path)
    fetch = pretrained and weights is None
    try:
        model = timm.create_model(name, pretrained=fetch, **settings)
    except Exception as error:  # whatever timm, the hub's client and the libraries below it raise
        if not fetch:
            raise
        why = f"the weights of {name} cannot be had here ({with_type(error).partition('; ')[0]})"
        use = "give model.weights=FILE or use model.pretrained=false"
        raise RefusedError("model.pretrained", True, f"{why}; {use}") from error
    if weights is not None:
        _load(model, Path(weights))
    return chain(model)


def _settings(name: str, num_classes: int, image_size: int, dropout: float, drop_path: float) -> dict[str, Any]:
    """The settings as this model's class takes them. Raises RefusedError for a name that timm does not know, a class
    without a chain, or settings that it does not have."""
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture) or (tag and name not in timm.list_pretrained(f"{architecture}.*")):
        near = get_close_matches(name, [*timm.list_models(), *timm.list_pretrained()], n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has them all"
        raise RefusedError("model.name", name, f"timm has no model of this name; {remedy}")
    # Shapes alone tell the class, and what it can do, before a large model is given memory.
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=num_classes)
    chain(model)
    accepted = inspect.signature(type(model).__init__).parameters
    settings: dict[str, Any] = {"num_classes": num_classes, "drop_rate": dropout}
    if "drop_path_rate" in accepted:
        settings["drop_path_rate"] = drop_path
    elif drop_path:
        raise RefusedError("model.drop_path", drop_path, f"{name} has no branches to drop; use 0")
    if "img_size" in accepted:
        settings["img_size"] = image_size
        patch = max(getattr(model, "patch_embed", getattr(model, "stem", None)).patch_size)  # type: ignore[union-attr]
        if image_size % patch:
            below = max(image_size // patch, 1) * patch
            why = f"{name} cuts images into patches of {patch} pixels; use {below} or {below + patch}"
            raise RefusedError("dataset.image_size", image_size, why)
    return settings


def _load(model: Any, file: Path) -> None:
    """Fill `model` with the tensors of `file`; a classifier for another number of classes is left out.

    Raises ValueError for a file that cannot be read or whose tensors are not those of the model.
    """
    tensors, own = _read(model, file), model.state_dict()
    # A classifier is left out whole: one tensor for another number of classes tells that all are.
    classifier = f"{model.pretrained_cfg['classifier']}."
    shared = [name for name in own if name.startswith(classifier) and name in tensors]
    if any(tensors[name].shape[:1] != own[name].shape[:1] for name in shared):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(classifier)}
        own = {name: tensor for name, tensor in own.items() if not name.startswith(classifier)}
    # Old files have no batch norm's count of mini-batches; only an average over all of them would need the number.
    missing = [name for name in own if name not in tensors and not name.endswith("num_batches_tracked")]
    unknown = [name for name in tensors if name not in own]
    other = [name for name in tensors if name in own and tensors[name].shape != own[name].shape]
    for what, names in (("lacks", missing), ("has besides", unknown), ("has in another shape", other)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            why = f"these are not the weights of this model, the file {what} {names[0]}{more}"
            raise RefusedError("model.weights", file, f"{why}; give those of the network that model.name names")
    model.load_state_dict(tensors, strict=False)


def _read(model: Any, file: Path) -> dict[str, Tensor]:
    """The tensors in `file`, read without running code; a vision Transformer's positions are stretched to its images.

    Raises ValueError if that is not possible.
    """
    from timm.models import VisionTransformer, load_state_dict
    from timm.models.vision_transformer import checkpoint_filter_fn

    if not file.is_file():
        raise RefusedError("model.weights", file, "there is no such file")
    try:
        tensors: Any = load_state_dict(str(file), device="cpu", weights_only=True)
        if isinstance(model, VisionTransformer):
            tensors = checkpoint_filter_fn(tensors, model)
    except Exception as error:  # two formats, each with exceptions of its own
        use = "use a .safetensors file or a dictionary of tensors that torch.save wrote"
        raise RefusedError(
            "model.weights", file, f"cannot be read as weights ({with_type(error).partition('; ')[0]}); {use}"
        ) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise RefusedError("model.weights", file, "does not hold a dictionary of tensors; save model.state_dict()")
    return dict(tensors)
