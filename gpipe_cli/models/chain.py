"""timm's networks as chains: a stem, one layer per block, a head. The paper pipelines any sequence of layers.

timm's models are trees whose forward is written by hand, one way for each family. Here each family is a list of the
model's own modules in the order in which they run, cut where a single tensor passes. The modules are not copied, so the
chain computes what the model computes, bit for bit.

    resnet18:  stem  layer1_0  layer1_1  layer2_0 ... layer4_1  head

Inside a layer every module keeps the path that it has in timm's model: the tensor `layer1_0.layer1.0.conv1.weight` of
the chain is timm's `layer1.0.conv1.weight`, and files of weights fit in both directions.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.config.typed import RefusedError

# The modules of the stem, the modules whose children are a layer each (`*`: of every child), the modules of the head.
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


def chain(model: Any) -> nn.Sequential:
    """The layers of a model of timm as a sequence; it holds the model's own modules, not copies.

    Raises RefusedError for a model whose class is none of the families, or that is built in a way unknown here.
    """
    from timm import models

    kind, name = type(model).__name__, model.pretrained_cfg["architecture"]
    # A class by itself and not its subclasses: what these change is not known here.
    if kind not in FAMILIES or type(model) is not getattr(models, kind):
        use = f"use one of {', '.join(FAMILIES)}"
        raise RefusedError("model.name", name, f"timm's class {kind} has no chain of layers; {use}")
    if kind == "VisionTransformer" and (model.attn_pool is not None or model.dynamic_img_size):
        what = "pools by attention" if model.attn_pool is not None else "takes images of any size"
        use = "which its chain of layers does not know; use one that does not, such as vit_tiny_patch16_224"
        raise RefusedError("model.name", name, f"this VisionTransformer {what}, {use}")
    stem, parents, head = FAMILIES[kind]
    layers = {"stem": stem.split()} if stem else {}
    for path in itertools.chain.from_iterable(_children(model, parent) for parent in parents.split()):
        if kind == "VGG" and not isinstance(model.get_submodule(path), nn.Conv2d):
            # with the convolution before it: a ReLU works in place and must not meet another layer's result
            layers[next(reversed(layers))].append(path)
        elif kind == "ConvNeXt" and path.endswith(".blocks.0"):
            layers[path] = [path.replace("blocks.0", "downsample"), path]
        else:
            layers[path] = [path]
    layers["head"] = head.split()
    sequence = nn.Sequential()
    for path, steps in layers.items():
        piece = TokenStem if kind == "VisionTransformer" and path == "stem" else Piece
        sequence.add_module(path.replace(".", "_"), piece(model, steps))
    if forgotten := _tensors(model) ^ {name.partition(".")[2] for name in _tensors(sequence)}:
        why = f"this {kind} has tensors that its chain of layers does not know, such as {min(forgotten)}"
        raise RefusedError("model.name", name, f"{why}; use another member of the family")
    return sequence.train(model.training)


def _children(model: nn.Module, path: str) -> list[str]:
    """The paths of a module's children; `.*` in its path stands for every child of what is before."""
    before, star, after = path.partition(".*")
    parents = [child + after for child in _children(model, before)] if star else [path]
    return [f"{parent}.{name}" for parent in parents for name, _ in model.get_submodule(parent).named_children()]


def _tensors(model: nn.Module) -> set[str]:
    """The names of all parameters and buffers, of those too that no file of weights holds."""
    return {name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors}


class Piece(nn.Module):
    """Some modules of a model, applied one after the other: the layer of a chain.

    steps: their paths in the model, in the order in which they run. `dropout` and `pool` are none of the model's
    modules: it applies functions.
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
                self._put(step, model.get_submodule(step))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = self.get_submodule(step)(x)
        return x

    def _put(self, path: str, module: nn.Module) -> None:
        """Register `module` under `path`, with empty modules in between."""
        *parents, last = path.split(".")
        owner: nn.Module = self
        for parent in parents:
            if parent not in dict(owner.named_children()):
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(last, module)


class TokenStem(Piece):
    """The beginning of a vision Transformer: images (N, 3, H, W) -> patches as tokens (N, S, width), with positions.

    The class token and the register tokens, where there are any, come first.
    """

    def __init__(self, model: Any, steps: list[str]) -> None:
        super().__init__(model, steps)
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
    """From all tokens to one vector as `model` pools, (N, S, width) -> (N, width)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.kind = model.global_pool
        self.prefix_tokens = getattr(model, "num_prefix_tokens", 0)
        self.include_prefix = getattr(model, "pool_include_prefix", True)

    def forward(self, x: Tensor) -> Tensor:
        from timm.layers import global_pool_nlc

        return global_pool_nlc(x, self.kind, self.prefix_tokens, self.include_prefix)
