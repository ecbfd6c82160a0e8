"""Networks of timm by name, as chains: for the paper's fine-tuning (Section 4, Table 4), in addition to AmoebaNet.

timm's networks are trees whose forward is written by hand for each family. Here each family is a list of the model's
modules in execution order, cut where a single tensor passes from a module to the next: the chain's results are the
model's, bit for bit.

    resnet18:  stem  layer1_0  layer1_1  layer2_0 ... layer4_1  head

Within a layer every module keeps its path in timm's model: the tensor `layer1_0.layer1.0.conv1.weight` of the chain is
timm's `layer1.0.conv1.weight`, so files of weights can be exchanged in both directions.

timm initialises a model only as a whole: every process builds it in memory and keeps the layers of its stages.
"""

import inspect
import itertools
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.errors import InvalidSettingError, describe_error
from gpipe_cli.models.module_paths import add_submodule_at
from gpipe_cli.system.files import regular_size


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
    """A network of timm as a chain of layers: images (N, 3, S, S) -> logits (N, num_classes).

    Initial values come from torch's default generator, as in timm. On the meta device, `pretrained` and `weights` must
    not be given.

    Args:
        name: timm's name, with or without the tag of its weights: "resnet50", "resnet50.a1_in1k".
        num_classes: a loaded classifier for another number is ignored, and the new classifier keeps its initial values.
        image_size: S, pixels; vision Transformers and MLP-Mixers are built for this size only.
        dropout: probability of dropping a feature before the classifier.
        drop_path: probability of dropping the last block's residual branch; lower in earlier blocks, as in timm.
        pretrained: load timm's weights (from its cache or the network); `weights` takes precedence.
        weights: a file with tensors under timm's names, .safetensors or what torch.save writes.

    Raises InputError for an unknown name, a family without a chain, a setting that the model does not have, and weights
    that do not fit or cannot be loaded.
    """
    import timm

    settings = _settings(name, num_classes, image_size, dropout, drop_path)
    fetch = pretrained and weights is None
    try:
        model = timm.create_model(name, pretrained=fetch, **settings)
    except Exception as error:  # whatever timm, the hub's client and the libraries below it raise
        if not fetch:
            raise
        why = f"the weights of {name} cannot be loaded ({describe_error(error).partition('; ')[0]})"
        use = "give model.weights=FILE or use model.pretrained=false"
        raise InvalidSettingError("model.pretrained", True, f"{why}; {use}") from error
    if weights is not None:
        _load(model, Path(weights))
    return as_sequential(model)


def timm_arguments(name: str, *, num_classes: int, image_size: int) -> dict[str, Any]:
    """The arguments of `timm.create_model(name, ...)` for the network that `build_timm` cuts into layers."""
    settings = _settings(name, num_classes, image_size, dropout=0.0, drop_path=0.0)
    return {key: value for key, value in settings.items() if value}


def _settings(name: str, num_classes: int, image_size: int, dropout: float, drop_path: float) -> dict[str, Any]:
    """The arguments of `timm.create_model` that this model's class takes. Raises InvalidSettingError."""
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture) or (tag and name not in timm.list_pretrained(f"{architecture}.*")):
        near = get_close_matches(name, [*timm.list_models(), *timm.list_pretrained()], n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has them all"
        raise InvalidSettingError("model.name", name, f"timm has no model of this name; {remedy}")
    # The class and its signature are all that is needed: no memory is allocated for a large model.
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=num_classes)
    as_sequential(model)
    accepted = inspect.signature(type(model).__init__).parameters
    settings: dict[str, Any] = {"num_classes": num_classes, "drop_rate": dropout}
    if "drop_path_rate" in accepted:
        settings["drop_path_rate"] = drop_path
    elif drop_path:
        raise InvalidSettingError("model.drop_path", drop_path, f"{name} has no branches to drop; use 0")
    if "img_size" in accepted:
        settings["img_size"] = image_size
        # a model that takes img_size has either attribute
        patch = max(getattr(model, "patch_embed", getattr(model, "stem", None)).patch_size)  # type: ignore[union-attr]
        if image_size % patch:
            below = max(image_size // patch, 1) * patch
            why = f"{name} cuts images into patches of {patch} pixels; use {below} or {below + patch}"
            raise InvalidSettingError("dataset.image_size", image_size, why)
    return settings


def _load(model: Any, file: Path) -> None:
    """Load the tensors of `file` into `model`. Raises InputError if it cannot be read or they do not fit the model."""
    tensors = _read(model, file)
    needed = model.state_dict()
    # If any tensor of the classifier is for another number of classes, so is the whole classifier: drop it.
    classifier = f"{model.pretrained_cfg['classifier']}."
    shared = [name for name in needed if name.startswith(classifier) and name in tensors]
    if any(tensors[name].shape[:1] != needed[name].shape[:1] for name in shared):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(classifier)}
        needed = {name: tensor for name, tensor in needed.items() if not name.startswith(classifier)}
    # Old files lack batch norm's num_batches_tracked, which only a cumulative average (momentum=None) would need.
    missing = [name for name in needed if name not in tensors and not name.endswith("num_batches_tracked")]
    unknown = [name for name in tensors if name not in needed]
    misshapen = [name for name in tensors if name in needed and tensors[name].shape != needed[name].shape]
    for what, names in (("lacks", missing), ("also has", unknown), ("has in another shape", misshapen)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            why = f"these are not the weights of this model, the file {what} {names[0]}{more}"
            raise InvalidSettingError("model.weights", file, f"{why}; give weights of the network model.name")
    model.load_state_dict(tensors, strict=False)


def _read(model: Any, file: Path) -> dict[str, Tensor]:
    """The tensors in `file`, read without running its code; a vision Transformer's positions are resized to fit."""
    from timm.models import VisionTransformer, load_state_dict
    from timm.models.vision_transformer import checkpoint_filter_fn

    try:
        regular_size(file)  # a named pipe would block
        tensors: Any = load_state_dict(str(file), device="cpu", weights_only=True)
        if isinstance(model, VisionTransformer):
            tensors = checkpoint_filter_fn(tensors, model)
    except Exception as error:  # a missing file, or whatever the reader of either format raises
        use = "use a .safetensors file or a dictionary of tensors that torch.save wrote"
        why = f"cannot be read as weights ({describe_error(error).partition('; ')[0]})"
        raise InvalidSettingError("model.weights", file, f"{why}; {use}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        why = "does not hold a dictionary of tensors; save model.state_dict()"
        raise InvalidSettingError("model.weights", file, why)
    return dict(tensors)


# Family -> modules of the stem, modules of which each child is a layer (`*`: of every child), modules of the head.
FAMILIES = {
    "ResNet": ("conv1 bn1 act1 maxpool", "layer1 layer2 layer3 layer4", "global_pool dropout fc"),
    "ConvNeXt": ("stem", "stages.*.blocks", "norm_pre head"),
    "VisionTransformer": ("patch_embed pos_drop patch_drop norm_pre", "blocks", "norm pool fc_norm head_drop head"),
    "EfficientNet": ("conv_stem bn1", "blocks.*", "conv_head bn2 global_pool dropout classifier"),
    "MobileNetV3": ("conv_stem bn1", "blocks.*", "global_pool conv_head norm_head act2 flatten dropout classifier"),
    "RegNet": ("stem", "s1 s2 s3 s4", "final_conv head"),
    "VGG": ("", "features", "pre_logits head"),
    "MlpMixer": ("stem", "blocks", "norm pool head_drop head"),
}


def as_sequential(model: Any) -> nn.Sequential:
    """The layers of a model of timm as a sequence.

    Raises InvalidSettingError for a model of an unknown family, or of an unknown variant of a family.
    """
    from timm import models

    kind = type(model).__name__
    name = model.pretrained_cfg["architecture"]
    # No subclasses: they may change the forward.
    if kind not in FAMILIES or type(model) is not getattr(models, kind):
        use = f"use one of {', '.join(FAMILIES)}"
        raise InvalidSettingError("model.name", name, f"timm's class {kind} has no chain of layers; {use}")
    if kind == "VisionTransformer" and (model.attn_pool is not None or model.dynamic_img_size):
        what = "pools by attention" if model.attn_pool is not None else "takes images of any size"
        use = "use one that does not, such as vit_tiny_patch16_224"
        raise InvalidSettingError("model.name", name, f"this VisionTransformer {what}; {use}")
    stem, parents, head = FAMILIES[kind]
    layers = {"stem": stem.split()} if stem else {}
    for path in itertools.chain.from_iterable(_children(model, parent) for parent in parents.split()):
        if kind == "VGG" and not isinstance(model.get_submodule(path), nn.Conv2d):
            # joins the convolution before it: a ReLU works in place and must not change another layer's output
            layers[next(reversed(layers))].append(path)
        elif kind == "ConvNeXt" and path.endswith(".blocks.0"):
            layers[path] = [path.replace("blocks.0", "downsample"), path]
        else:
            layers[path] = [path]
    layers["head"] = head.split()
    sequence = nn.Sequential()
    for path, steps in layers.items():
        piece = TokenStem if kind == "VisionTransformer" and path == "stem" else TimmLayer
        sequence.add_module(path.replace(".", "_"), piece(model, steps))
    if forgotten := _tensors(model) ^ {name.partition(".")[2] for name in _tensors(sequence)}:
        why = f"this {kind} has tensors that its chain of layers lacks, such as {min(forgotten)}"
        raise InvalidSettingError("model.name", name, f"{why}; use another member of the family")
    return sequence.train(model.training)


def _children(model: nn.Module, path: str) -> list[str]:
    """The paths of a module's children; `a.*` in `path` stands for every child of `a`."""
    before, star, after = path.partition(".*")
    parents = [child + after for child in _children(model, before)] if star else [path]
    return [f"{parent}.{name}" for parent in parents for name, _ in model.get_submodule(parent).named_children()]


def _tensors(model: nn.Module) -> set[str]:
    """The names of all parameters and buffers, including the buffers that no file of weights holds."""
    return {name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors}


class TimmLayer(nn.Module):
    """A layer of a chain: some modules of timm's model, applied in order.

    steps: paths of the modules; `dropout` and `pool` stand for functions that the model's forward calls.
    """

    def __init__(self, model: Any, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        for step in steps:
            if step == "pool":
                self.add_module(step, Pool(model))
            elif step == "dropout":
                self.add_module(step, nn.Dropout(model.drop_rate))
            else:
                add_submodule_at(self, step, model.get_submodule(step))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.get_submodule(step)(x)
        return x

    @property
    def compiled_as(self) -> nn.Module:
        """The module to compile: a single module without its path, which differs between otherwise equal blocks."""
        return self.get_submodule(self.steps[0]) if type(self) is TimmLayer and len(self.steps) == 1 else self


class TokenStem(TimmLayer):
    """The stem of a vision Transformer: images (N, 3, H, W) -> class and register tokens, if any, and
    patches with their positions (N, S, width)."""

    def __init__(self, model: Any, steps: list[str]) -> None:
        super().__init__(model, steps)
        self.cls_token, self.reg_token, self.pos_embed = model.cls_token, model.reg_token, model.pos_embed
        self.only_patches_have_positions = model.no_embed_class

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (self.get_submodule(step) for step in self.steps)
        x = first(x)
        if self.only_patches_have_positions and self.pos_embed is not None:
            x = x + self.pos_embed
        # not len(x), which torch.export makes a constant
        tokens = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if tokens:
            x = torch.cat([*tokens, x], dim=1)
        if not self.only_patches_have_positions and self.pos_embed is not None:
            x = x + self.pos_embed
        for module in others:
            x = module(x)
        return x


class Pool(nn.Module):
    """Pools all tokens into a vector as `model` does, (N, S, width) -> (N, width)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.kind = model.global_pool
        self.prefix_tokens = getattr(model, "num_prefix_tokens", 0)
        self.include_prefix = getattr(model, "pool_include_prefix", True)

    def forward(self, x: Tensor) -> Tensor:
        from timm.layers import global_pool_nlc

        return global_pool_nlc(x, self.kind, self.prefix_tokens, self.include_prefix)
