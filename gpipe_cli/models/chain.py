"""timm's networks as chains: a stem, one layer per block, a head. The paper pipelines any sequence of layers.

timm's models are trees whose forward is written by hand, one way for each family. Here each family is a list of the
model's own modules in the order in which they run, cut where a single tensor passes. The modules are not copied, so the
chain computes what the model computes, bit for bit.

    resnet18:  stem  layer1_0  layer1_1  layer2_0 ... layer4_1  head

Inside a layer every module keeps the path that it has in timm's model: the tensor `layer1_0.layer1.0.conv1.weight` of
the chain is timm's `layer1.0.conv1.weight`, and files of weights fit in both directions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Layers = dict[str, nn.Module]


class Piece(nn.Module):
    """Some modules of a model, applied one after the other: the layer of a chain.

    Args:
        model: where they are.
        steps: their paths in the model, in the order in which they run.
        more: modules without tensors that the model applies as functions, by the name under which `steps` has them.
    """

    def __init__(self, model: nn.Module, *steps: str, **more: nn.Module) -> None:
        super().__init__()
        self.steps = steps
        for step in steps:
            _put(self, step, more[step] if step in more else model.get_submodule(step))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.get_submodule(step)(x)
        return x


class TokenStem(Piece):
    """The beginning of a vision Transformer: images (N, 3, H, W) -> patches as tokens (N, S, width), with positions.

    The class token and the register tokens, where there are any, come first.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, "patch_embed", "pos_drop", "patch_drop", "norm_pre")
        self.cls_token, self.reg_token, self.pos_embed = model.cls_token, model.reg_token, model.pos_embed
        self.only_patches_have_positions = model.no_embed_class

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (self.get_submodule(step) for step in self.steps)
        x = first(x)
        if self.only_patches_have_positions and self.pos_embed is not None:
            x = x + self.pos_embed
        tokens = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if tokens:
            x = torch.cat([*tokens, x], dim=1)
        if not self.only_patches_have_positions and self.pos_embed is not None:
            x = x + self.pos_embed
        for module in others:
            x = module(x)
        return x


class Pool(nn.Module):
    """From all tokens to one vector, (N, S, width) -> (N, width), by a function without tensors."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def chain(model: nn.Module) -> nn.Sequential:
    """The layers of a model of timm as a sequence; it holds the model's own modules, not copies.

    Raises ValueError for a model whose class is not one of the families, or that is built in a way which the chain does
    not know.
    """
    from timm import models

    families: dict[type[nn.Module], Callable[[Any], Layers]] = {
        models.ResNet: _resnet,
        models.ConvNeXt: _convnext,
        models.VisionTransformer: _vision_transformer,
        models.EfficientNet: _efficientnet,
        models.MobileNetV3: _mobilenet_v3,
        models.RegNet: _regnet,
        models.VGG: _vgg,
        models.MlpMixer: _mixer,
    }
    # A class by itself and not its subclasses: what these change is not known here.
    kind = type(model)
    if kind not in families:
        names = ", ".join(family.__name__ for family in families)
        raise ValueError(f"model.name: timm's class {kind.__name__} has no chain of layers; use one of {names}")
    sequence = nn.Sequential()
    for name, layer in families[kind](model).items():
        sequence.add_module(name.replace(".", "_"), layer)
    if forgotten := _tensors(model) ^ {name.partition(".")[2] for name in _tensors(sequence)}:
        raise ValueError(
            f"model.name: this {kind.__name__} has tensors that its chain of layers does not know, such as "
            f"{min(forgotten)}; use another member of the family"
        )
    return sequence.train(model.training)


def _put(owner: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` below `owner` under `path`, with empty modules in between."""
    *parents, last = path.split(".")
    for parent in parents:
        if parent not in dict(owner.named_children()):
            owner.add_module(parent, nn.Module())
        owner = owner.get_submodule(parent)
    owner.add_module(last, module)


def _tensors(model: nn.Module) -> set[str]:
    """The names of all parameters and buffers, of those too that no file of weights holds."""
    return {name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors}


def _children(model: nn.Module, path: str) -> list[str]:
    return [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]


def _blocks(model: nn.Module, *stages: str) -> Layers:
    """Every child of every stage as a layer of its own."""
    return {path: Piece(model, path) for stage in stages for path in _children(model, stage)}


def _resnet(model: Any) -> Layers:
    stages = [name for name, _ in model.named_children() if name.startswith("layer")]
    return {
        "stem": Piece(model, "conv1", "bn1", "act1", "maxpool"),
        **_blocks(model, *stages),
        "head": Piece(model, "global_pool", "dropout", "fc", dropout=nn.Dropout(model.drop_rate)),
    }


def _convnext(model: Any) -> Layers:
    layers: Layers = {"stem": Piece(model, "stem")}
    for stage in _children(model, "stages"):
        first, *others = _children(model, f"{stage}.blocks")
        layers[first] = Piece(model, f"{stage}.downsample", first)
        layers |= {block: Piece(model, block) for block in others}
    return {**layers, "head": Piece(model, "norm_pre", "head")}


def _vision_transformer(model: Any) -> Layers:
    from timm.layers import global_pool_nlc

    if model.attn_pool is not None or model.dynamic_img_size:
        what = "pools by attention" if model.attn_pool is not None else "takes images of any size"
        raise ValueError(
            f"model.name: this VisionTransformer {what}, which its chain of layers does not "
            "know; use one that does not, such as model.name=vit_tiny_patch16_224"
        )
    pool = partial(
        global_pool_nlc,
        pool_type=model.global_pool,
        num_prefix_tokens=model.num_prefix_tokens,
        reduce_include_prefix=model.pool_include_prefix,
    )
    return {
        "stem": TokenStem(model),
        **_blocks(model, "blocks"),
        "head": Piece(model, "norm", "pool", "fc_norm", "head_drop", "head", pool=Pool(pool)),
    }


def _mixer(model: Any) -> Layers:
    pool = Pool(partial(torch.mean, dim=1)) if model.global_pool == "avg" else nn.Identity()
    return {
        "stem": Piece(model, "stem"),
        **_blocks(model, "blocks"),
        "head": Piece(model, "norm", "pool", "head_drop", "head", pool=pool),
    }


def _efficientnet(model: Any) -> Layers:
    return _mobile(model, "conv_head", "bn2", "global_pool", "dropout", "classifier")


def _mobilenet_v3(model: Any) -> Layers:
    return _mobile(model, "global_pool", "conv_head", "norm_head", "act2", "flatten", "dropout", "classifier")


def _mobile(model: Any, *head: str) -> Layers:
    return {
        "stem": Piece(model, "conv_stem", "bn1"),
        **_blocks(model, *_children(model, "blocks")),
        "head": Piece(model, *head, dropout=nn.Dropout(model.drop_rate)),
    }


def _regnet(model: Any) -> Layers:
    return {
        "stem": Piece(model, "stem"),
        **_blocks(model, "s1", "s2", "s3", "s4"),
        "head": Piece(model, "final_conv", "head"),
    }


def _vgg(model: Any) -> Layers:
    """A layer begins with each convolution: the ReLU behind it works in place and must not meet another layer's
    result."""
    layers: dict[str, list[str]] = {}
    name = ""
    for path in _children(model, "features"):
        if isinstance(model.get_submodule(path), nn.Conv2d):
            name = path
        layers.setdefault(name, []).append(path)
    pieces: Layers = {name: Piece(model, *paths) for name, paths in layers.items()}
    return {**pieces, "head": Piece(model, "pre_logits", "head")}
