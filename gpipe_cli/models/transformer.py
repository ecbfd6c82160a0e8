"""What both Transformers of the paper are made of (Table 1 and Section 5): attention, feed-forward, embedding, softmax.

The paper describes no more than the sizes; the rest follows Lingvo, its code base: a normalisation before each part,
dropout only on the attention weights and on what a part adds to its input, sinusoidal positions, an embedding drawn
from N(0, 1 / width) and multiplied by sqrt(width). Weights start after Glorot, biases at zero.

No module owns a buffer, and all that own parameters can fill them in alone, as a process builds its own layers only.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.config.typed import RefusedError

# The longest wave of the positions is 10000 times 2 pi tokens long (Vaswani et al. 2017, Section 3.5).
LONGEST_WAVE = 10_000.0


class Projection(nn.Linear):
    """A linear map with bias, (..., inputs) -> (..., outputs); its weights start after Glorot, times `scale`."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        self.scale = scale  # before the base class, which draws the weights at once
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight, gain=self.scale)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Vectors of tokens with their positions added, (N, S) integers -> (N, S, width).

    `length` is the longest sequence, tokens. Positions have no parameters, so it is a check and no size.

    Raises ValueError for an odd width, which has no two halves for sines and cosines.
    """

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        if width % 2:
            why = f"half of it are sines, half cosines; use {width - 1} or {width + 1}"
            raise RefusedError("model.width", width, why)
        self.length = length
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.with_positions(super().forward(tokens))

    def with_positions(self, vectors: Tensor) -> Tensor:
        """Vectors (N, S, width) as they stand in the table, scaled, and with positions from 0 to S - 1.

        Raises ValueError for a sequence longer than the model's length.
        """
        if vectors.shape[1] > self.length:
            why = f"a sequence has {vectors.shape[1]} tokens; cut it or raise model.length"
            raise RefusedError("model.length", self.length, why)
        return vectors * math.sqrt(self.embedding_dim) + sinusoids(vectors.shape[1], vectors)


def sinusoids(length: int, like: Tensor) -> Tensor:
    """Positions 0 to length - 1 as waves, (length, width) of the width, type and device of `like`.

    Column i of the first half is sin(p / 10000^(2 i / width)), of the second half the cosine. (Vaswani et al. let sine
    and cosine alternate; halves are how Lingvo has them, and the order of columns means nothing to a Transformer.)
    """
    half = like.shape[-1] // 2
    waves = torch.arange(half, device=like.device, dtype=torch.float32) * (-math.log(LONGEST_WAVE) / half)
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * waves.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class Attention(nn.Module):
    """Multi-head attention with four matrices and their biases, queries (N, T, width) -> (N, T, width).

    head_width: entries of a query, a key or a value; `heads * head_width` need not be `width`. dropout: probability to
    drop an attention weight.
    """

    def __init__(self, width: int, heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        channels = heads * head_width
        self.heads = heads
        self.dropout = dropout
        self.query = Projection(width, channels)
        self.key = Projection(width, channels)
        self.value = Projection(width, channels)
        self.output = Projection(channels, width)

    def forward(self, queries: Tensor, memory: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Attend from `queries` (N, T, width) to `memory` (N, S, width).

        mask: (N, S), False where a position of the memory must not be seen. causal: position t sees 0 to t only.
        """
        mixed = F.scaled_dot_product_attention(
            self._heads(self.query(queries)),
            self._heads(self.key(memory)),
            self._heads(self.value(memory)),
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(N, S, heads * head_width) -> (N, heads, S, head_width)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear maps with ReLU between, (N, S, width) -> (N, S, width); `scale` multiplies their initial weights."""

    def __init__(self, width: int, hidden: int, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = Projection(width, hidden, scale)
        self.outer = Projection(hidden, width, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(x)))


class SelfAttentionLayer(nn.Module):
    """x plus attention of x to itself, then plus feed-forward, each on normalised input: (N, S, width) -> the same.

    A layer of the language model (causal) and of the encoder (with a mask).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        head_width: int,
        dropout: float,
        attention_dropout: float,
        *,
        causal: bool,
        feed_forward_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_width, attention_dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden, feed_forward_scale)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normalised = self.attention_norm(x)
        x = x + self.dropout(self.attention(normalised, normalised, mask, causal=self.causal))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Softmax(nn.Module):
    """The end of a stack: normalisation and a linear map to the vocabulary, (N, S, width) -> logits (N, S, vocabulary).

    The softmax itself is part of the loss. clip: no logit is larger than this or smaller than minus this; 0 is off.
    """

    def __init__(self, width: int, vocabulary: int, clip: float = 0.0) -> None:
        super().__init__()
        self.clip = clip
        self.norm = nn.LayerNorm(width)
        self.logits = Projection(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(self.norm(x))
        return logits.clamp(-self.clip, self.clip) if self.clip else logits
