"""The layers that models of transformers are cut into. Each holds modules of the model at their paths in it, and does
with them what the model's forward does between two blocks.

Layers of a translation model exchange, like those of `transformer_nmt`, the tuple

    source (N, S, width), source mask (N, S) bool, target (N, T, width) -- or (N, T) int64 while it is not yet embedded
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipe_cli.models.hugging_face_weights import InitialValues
from gpipe_cli.models.module_paths import add_submodule_at

Mask = Literal["causal", "sliding", "bidirectional"]  # which positions of its sequence a position attends to
Tensors = tuple[Tensor, ...]


class HFLayer(nn.Module):
    """Some modules of a model of transformers, applied in order; `paths`: where they are in the model."""

    def __init__(self, model: nn.Module, initial: InitialValues, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = tuple(paths)
        for path in paths:
            add_submodule_at(self, path, model.get_submodule(path))
        self.initial = initial

    def initialise_weights(self) -> None:
        """Set all parameters and buffers, from the model's files or torch's default generator. Raises InputError."""
        self.initial.set(self)

    def reads(self) -> tuple[tuple[object, ...], list[object]]:
        """What the forward reads, and the configurations in that: equal blocks differ only in their paths."""
        configurations = [config for part in self.modules() if (config := vars(part).get("config")) is not None]
        plain = {key: value for key, value in vars(self).items() if isinstance(value, bool | int | float | str)}
        return (type(self), plain, *map(self.get_submodule, self.paths)), configurations

    def forward(self, x: Any) -> Any:
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return x


class TokenEmbedding(HFLayer):
    """Tokens (N, S) -> hidden states (N, S, width). `paths`: the tokens' embedding; if positions are also embedded,
    that and a dropout."""

    def forward(self, x: Tensor) -> Tensor:
        embed_tokens, *others = map(self.get_submodule, self.paths)
        hidden: Tensor = embed_tokens(x)
        if others:
            embed_positions, dropout = others
            hidden = dropout(hidden + embed_positions(_positions(x)))
        return hidden


class Block(HFLayer):
    """A block over a single sequence: hidden states (N, S, width) -> the same. `rotary`: the path of the model's rotary
    tables, None if it has none."""

    def __init__(self, model: Any, initial: InitialValues, path: str, mask: Mask, rotary: str | None = None) -> None:
        super().__init__(model, initial, [path])
        stack = path.partition(".")[0]
        config = self._config = getattr(model.get_submodule(stack), "config", model.config)
        self._mask = mask
        if rotary is not None:
            # a copy for each block, as a stage owns its layers: a few numbers
            add_submodule_at(self, rotary, copy.deepcopy(model.get_submodule(rotary), {id(config): config}))
            self.paths += (rotary,)
        for part in self.modules():
            if "layer_idx" in vars(part):
                vars(part)["layer_idx"] = None  # the place in a cache of keys and values, which training does not have

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """padding: bool (N, S), False at positions that must not be seen."""
        block, *rotary = map(self.get_submodule, self.paths)
        settings = {"position_embeddings": rotary[0](x, _positions(x))} if rotary else {}
        return _hidden_states_of(block(x, attention_mask=self._self_attention_mask(x, padding), **settings))

    def _self_attention_mask(self, hidden: Tensor, padding: Tensor | None = None) -> Any:
        """The mask of a block's self-attention, made as in the model's forward."""
        from transformers import masking_utils as masks

        arguments = {"config": self._config, "inputs_embeds": hidden, "attention_mask": padding}
        if self._mask == "bidirectional":
            return masks.create_bidirectional_mask(**arguments, allow_is_bidirectional_skip=padding is None)
        make = masks.create_sliding_window_causal_mask if self._mask == "sliding" else masks.create_causal_mask
        return make(**arguments, cache=None)


class ClassifierHead(HFLayer):
    """The last norm, and logits of the first token: (N, S, width) -> (N, classes)."""

    def forward(self, x: Tensor) -> Tensor:
        norm, classifier = map(self.get_submodule, self.paths)
        logits: Tensor = classifier(norm(x)[:, 0, :])
        return logits


class SourceEmbedding(HFLayer):
    """(source (N, S), target (N, T)) -> (source, mask, target), the source embedded; `pad`: the padding token."""

    def __init__(self, model: nn.Module, initial: InitialValues, paths: Sequence[str], pad: int) -> None:
        super().__init__(model, initial, paths)
        self.pad = pad

    def forward(self, x: Tensors) -> Tensors:
        source, target = x
        return super().forward(source), source != self.pad, target


class EncoderBlock(Block):
    """A block over the source, padding masked; passes on the target."""

    def forward(self, x: Tensors) -> Tensors:  # type: ignore[override]  # takes a tuple
        source, mask, target = x
        return super().forward(source, mask), mask, target


class EncoderNorm(HFLayer):
    """Normalises the encoded source once for all blocks of the decoder."""

    def forward(self, x: Tensors) -> Tensors:
        source, mask, target = x
        return super().forward(source), mask, target


class TargetEmbedding(HFLayer):
    """(source, mask, target (N, T) int64) -> the same with the target embedded."""

    def forward(self, x: Tensors) -> Tensors:
        source, mask, target = x
        return source, mask, super().forward(target)


class DecoderBlock(Block):
    """Attention to the target so far and to the source, and feed-forward; passes on the source. The last block returns
    the target alone, (N, T, width)."""

    last = False

    def forward(self, x: Tensors) -> Tensor | Tensors:  # type: ignore[override]  # takes a tuple
        from transformers.masking_utils import create_bidirectional_mask

        source, mask, target = x
        source_mask = create_bidirectional_mask(
            config=self._config,
            inputs_embeds=target,
            attention_mask=mask,
            encoder_hidden_states=source,
            allow_is_bidirectional_skip=False,
        )
        target = _hidden_states_of(
            self.get_submodule(self.paths[0])(
                target,
                attention_mask=self._self_attention_mask(target),
                encoder_hidden_states=source,
                encoder_attention_mask=source_mask,
            )
        )
        return target if self.last else (source, mask, target)


class TranslationHead(HFLayer):
    """The decoder's last norm and the logits: (N, T, width) -> (N, T, tokens). `scaled`: hidden states are divided by
    sqrt(width) before, for a softmax that shares the embedding's matrix."""

    def __init__(self, model: Any, initial: InitialValues, paths: Sequence[str], scaled: bool) -> None:
        super().__init__(model, initial, paths)
        self.factor = model.config.d_model**-0.5 if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        norm, dropout, logits = map(self.get_submodule, self.paths)
        x = dropout(norm(x))
        result: Tensor = logits(x if self.factor is None else x * self.factor)
        return result


def _hidden_states_of(result: Any) -> Tensor:
    """The hidden states that a block returns, alone or first in a tuple."""
    return result if isinstance(result, Tensor) else result[0]


def _positions(sequence: Tensor) -> Tensor:
    """The positions of (N, S, ...), (1, S)."""
    return torch.arange(sequence.shape[1], device=sequence.device)[None]
