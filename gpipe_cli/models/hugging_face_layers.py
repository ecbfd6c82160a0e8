"""The layers that models of transformers are cut into. Each holds modules of the model at the paths they have there,
and does with them what the model's own forward does between two blocks.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.models.hugging_face_weights import InitialValues
from gpipe_cli.models.paths import add_at


class Piece(nn.Module):
    """Some modules of a model of transformers, applied one after the other; `paths`: where they are in the model."""

    def __init__(self, model: nn.Module, initial: InitialValues, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = tuple(paths)
        for path in paths:
            add_at(self, path, model.get_submodule(path))
        self._initial = initial

    def initialise_weights(self) -> None:
        """Set all parameters and buffers, from the model's files or torch's default generator. Raises InputError."""
        self._initial.set(self)

    def reads(self) -> tuple[tuple[object, ...], list[object]]:
        """What the forward reads, and the configurations in that: equal blocks differ in their paths only."""
        configurations = [own for part in self.modules() if (own := vars(part).get("config")) is not None]
        return (type(self), self.training, *map(self.get_submodule, self.paths)), configurations

    def forward(self, x: Tensor) -> Tensor:
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return x


class TokenEmbedding(Piece):
    """Tokens (N, S) -> hidden states (N, S, width). `paths`: the tokens' embedding; where positions have one of their
    own, that and a dropout."""

    def forward(self, tokens: Tensor) -> Tensor:
        of_tokens, *others = (self.get_submodule(path) for path in self.paths)
        hidden: Tensor = of_tokens(tokens)
        if others:
            of_positions, dropout = others
            hidden = dropout(hidden + of_positions(_positions(tokens)))
        return hidden


class DecoderBlock(Piece):
    """A block of a causal language model, with the model's rotary tables if it has any: hidden states (N, S, width) ->
    the same."""

    def __init__(self, model: Any, initial: InitialValues, path: str) -> None:
        base, index = path.split(".")[0], int(path.rpartition(".")[2])
        rotary = f"{base}.rotary_emb"
        rotates = hasattr(model.get_submodule(base), "rotary_emb")
        super().__init__(model, initial, [path])
        config = self._config = model.config
        if rotates:
            # of its own, as a stage owns its layers: a few numbers
            tables = copy.deepcopy(model.get_submodule(rotary), {id(config): config})
            add_at(self, rotary, tables)
            self.paths += (rotary,)
        kinds = getattr(config, "layer_types", None)
        self._slides = bool(getattr(config, "sliding_window", None)) and (
            kinds is None or kinds[index] == "sliding_attention"
        )
        for part in self.modules():
            if "layer_idx" in vars(part):
                vars(part)["layer_idx"] = None  # the place in a cache of keys and values, which training has not

    def reads(self) -> tuple[tuple[object, ...], list[object]]:
        read, configurations = super().reads()
        return (*read, self._slides), configurations

    def forward(self, hidden: Tensor) -> Tensor:
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        block, *rotary = map(self.get_submodule, self.paths)
        settings = {"position_embeddings": rotary[0](hidden, _positions(hidden))} if rotary else {}
        make = create_sliding_window_causal_mask if self._slides else create_causal_mask
        mask = make(config=self._config, inputs_embeds=hidden, attention_mask=None, cache=None)
        result: Tensor = block(hidden, attention_mask=mask, use_cache=False, **settings)
        return result


class Head(Piece):
    """The last norm and the logits: (N, S, width) -> (N, S, tokens)."""


def _positions(sequence: Tensor) -> Tensor:
    """The positions of (N, S, ...), (1, S)."""
    return torch.arange(sequence.shape[1], device=sequence.device)[None]
