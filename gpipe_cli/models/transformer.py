"""Both Transformers of the paper: language model (Tables 1 and 2) and translation (Section 5), and their parts.

The paper calls its language model sequence-to-sequence, but its numbers of parameters fit a stack of L layers, with
separate matrices for embedding and softmax and with biases everywhere: 282.2M, 785.8M, 5.3B, 21.0B and 83.9B for
L = 3, 13, 103, 415 and 1663. Lingvo's language model for GPipe is built in the same way.

    embedding  layer_000 ... layer_{L-1}  softmax

The translation Transformers T(L, H, A) are L encoder and L decoder layers in sequence.

    embedding  encoder_00 ... encoder_norm [target_embedding]  decoder_00 ... softmax

A pipeline is a sequence, so the encoder passes on the target, which the decoder needs, and each decoder layer passes
on the encoded source, which the next layer needs. Layers always exchange the tuple

    source (N, S, width), source mask (N, S) bool, target (N, T, width) -- or (N, T) int64 while it is not yet embedded

With `shared_embedding`, one matrix embeds source and target in the first layer. Otherwise the target has its own matrix
at the start of the decoder, and only its token ids pass through the encoder. Layers may be tied: the softmax to the
embedding of what it predicts, and both embeddings to each other.

The paper reports 400M, 1.3B, 1.3B, 3B and 6B parameters. The width of the attention grows with the heads (64 channels
each): with 1024 channels for any number of heads, T(64, 16384, 32) would have 5.2B.

The paper gives only the sizes; the rest follows Lingvo, its code base: layer normalisation before each sublayer,
dropout only on attention weights and sublayer outputs, sinusoidal positions, an embedding drawn from N(0, 1 / width)
and multiplied by sqrt(width), Glorot-uniform weights, zero biases.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.errors import InvalidSettingError

MAX_WAVELENGTH = 10_000.0  # of the positions, in units of 2 pi tokens (Vaswani et al. 2017, Section 3.5)


class Projection(nn.Linear):
    """A linear map with bias, (..., inputs) -> (..., outputs); initial weights: Glorot-uniform times `scale`."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        self.scale = scale  # set first: the base class's constructor draws the weights
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:  # nothing to fill in, but for thousands of layers torch takes a second
            return
        nn.init.xavier_uniform_(self.weight, gain=self.scale)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Scaled token embeddings plus positions, (N, S) integers -> (N, S, width); `length`: the largest S.

    Raises InputError for an odd width.
    """

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        if width % 2:
            why = f"half of it are sines, half cosines; use {width - 1} or {width + 1}"
            raise InvalidSettingError("model.width", width, why)
        self.length = length
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.with_positions(super().forward(tokens))

    def with_positions(self, vectors: Tensor) -> Tensor:
        """Rows of the embedding matrix, (N, S, width), times sqrt(width) plus positions 0 to S - 1.

        Raises InputError for a sequence longer than the model's length.
        """
        if vectors.shape[1] > self.length:
            why = f"a sequence has {vectors.shape[1]} tokens; cut it or raise model.length"
            raise InvalidSettingError("model.length", self.length, why)
        return vectors * math.sqrt(self.embedding_dim) + sinusoids(vectors.shape[1], vectors)


def sinusoids(length: int, like: Tensor) -> Tensor:
    """Sinusoidal encoding of positions p = 0 to length - 1: (length, width), width, dtype and device as `like`.

    Column i of the first half is sin(p / 10000^(2 i / width)), of the second half the cosine, as in Lingvo; Vaswani
    et al. interleave the two, which makes no difference to a Transformer.
    """
    half = like.shape[-1] // 2
    waves = torch.arange(half, device=like.device, dtype=torch.float32) * (-math.log(MAX_WAVELENGTH) / half)
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * waves.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class Attention(nn.Module):
    """Multi-head attention with four projections with bias; `heads * head_width` need not be `width`.

    dropout: probability of dropping an attention weight.
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
        """Attend from `queries` (N, T, width) to `memory` (N, S, width): (N, T, width).

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
    """Residual self-attention, attention to the source (if `cross`) and feed-forward, each after layer normalisation:
    (N, S, width) -> the same.

    Serves the language model (causal), the encoder (with a mask) and the decoder (causal and cross).
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
        cross: bool = False,
        feed_forward_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_width, attention_dropout)
        if cross:
            self.source_attention_norm = nn.LayerNorm(width)
            self.source_attention = Attention(width, heads, head_width, attention_dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden, feed_forward_scale)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        """mask: bool (N, S), False at positions of `source`, or of x without a source, that must not be seen."""
        normalised = self.attention_norm(x)
        self_mask = mask if source is None else None
        x = x + self.dropout(self.attention(normalised, normalised, self_mask, causal=self.causal))
        if source is not None:
            x = x + self.dropout(self.source_attention(self.source_attention_norm(x), source, mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Softmax(nn.Module):
    """Layer normalisation and a linear map, (N, S, width) -> logits (N, S, vocabulary); the loss has the softmax.

    clip: the largest magnitude of a logit; 0 is off.
    """

    def __init__(self, width: int, vocabulary: int, clip: float = 0.0) -> None:
        super().__init__()
        self.clip = clip
        self.norm = nn.LayerNorm(width)
        self.logits = Projection(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(self.norm(x))
        return logits.clamp(-self.clip, self.clip) if self.clip else logits


def transformer_lm(
    *,
    layers: int,
    width: int = 2048,
    hidden: int = 8192,
    heads: int = 32,
    vocabulary: int = 32000,
    length: int = 1024,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    tie_embeddings: bool = False,
    make: Callable[..., Any] = call,
) -> nn.Sequential:
    """The network: tokens (N, S), int64, S up to `length` -> logits (N, S, vocabulary) of the next token.

    The defaults are Table 1's; the paper gives no dropout, 0.1 is Lingvo's. hidden: width between the two maps of a
    feed-forward sublayer. dropout: probability of dropping an entry of a sublayer's output. tie_embeddings: embedding
    and softmax have the same matrix. make: makes a layer, as in `amoebanet`.

    Raises InputError for an odd width, and if `heads` does not divide the width.
    """
    if width % heads:
        raise InvalidSettingError("model.width", width, f"must be a multiple of model.heads={heads}; change either")
    sequence: OrderedDict[str, nn.Module] = OrderedDict()
    sequence["embedding"] = embedding = Embedding(vocabulary, width, length)
    for index in range(layers):
        sequence[f"layer_{index:03d}"] = make(
            SelfAttentionLayer, width, hidden, heads, width // heads, dropout, attention_dropout, causal=True
        )
    sequence["softmax"] = softmax = Softmax(width, vocabulary)
    if tie_embeddings:
        softmax.logits.weight = embedding.weight
    return nn.Sequential(sequence)


class SourceEmbedding(Embedding):
    """(source (N, S), target (N, T)) -> (source, mask, target), the source embedded, the target only if `shared`."""

    def __init__(self, vocabulary: int, width: int, length: int, pad: int, *, shared: bool) -> None:
        super().__init__(vocabulary, width, length)
        self.pad, self.shared = pad, shared

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]  # takes a tuple
        source, target = inputs
        if not self.shared:
            return super().forward(source), source != self.pad, target
        # One look-up for both: each look-up has a gradient as large as the matrix.
        vectors = nn.Embedding.forward(self, torch.cat([source, target], dim=1))
        source_vectors, target_vectors = vectors.split([source.shape[1], target.shape[1]], dim=1)
        return self.with_positions(source_vectors), source != self.pad, self.with_positions(target_vectors)


class TargetEmbedding(Embedding):
    """(source, mask, target (N, T) int64) -> the same with the target embedded."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]  # takes a tuple
        source, mask, target = inputs
        return source, mask, super().forward(target)


class EncoderLayer(SelfAttentionLayer):
    """Self-attention over the source's tokens, padding masked, and feed-forward; passes on the target."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]  # takes a tuple
        source, mask, target = inputs
        return super().forward(source, mask), mask, target


class EncoderNorm(nn.LayerNorm):
    """Normalises the encoded source once for all decoder layers."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]  # takes a tuple
        source, mask, target = inputs
        return super().forward(source), mask, target


class DecoderLayer(SelfAttentionLayer):
    """Causal self-attention of the target, attention to the source, feed-forward; passes on the source.

    Padding at the end of a target needs no mask: no real token comes after it. The last layer returns the target alone,
    (N, T, width): no later layer needs the source.
    """

    last = False

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]  # takes a tuple
        source, mask, target = inputs
        target = super().forward(target, mask, source)
        return target if self.last else (source, mask, target)


def transformer_nmt(
    *,
    layers: int,
    hidden: int,
    heads: int,
    width: int = 1024,
    head_width: int = 64,
    vocabulary: int = 64000,
    length: int,
    dropout: float,
    attention_dropout: float,
    depth_scaled: bool,
    logit_clip: float,
    shared_embedding: bool,
    tie_embeddings: bool = False,
    share_vocabularies: bool = False,
    pad: int = 0,
    make: Callable[..., Any] = call,
) -> nn.Sequential:
    """The network: (source (N, S), target so far (N, T)), both int64 -> logits (N, T, vocabulary).

    Logits at position t are for the token that follows target tokens 0 to t. S and T are at most `length`.

    Args as in `transformer_lm` (hidden is H, heads is A), and:
        layers: L, of the encoder and of the decoder each.
        depth_scaled: divide the initial weights of feed-forward sublayers by L (the paper's first remedy against
            divergence, after Fixup).
        logit_clip: the largest magnitude of a logit (its second remedy; Lingvo's `logits_abs_max`); 0 is off.
        shared_embedding: one matrix embeds source and target, in the first layer.
        tie_embeddings: the softmax has the matrix that embeds the target.
        share_vocabularies: without `shared_embedding`, both embeddings have the same matrix.
        pad: id of the padding token; padded positions of the source are masked.

    Raises InputError for an odd width.
    """
    scale = 1 / layers if depth_scaled else 1.0
    sizes = (width, hidden, heads, head_width, dropout, attention_dropout)
    sequence: OrderedDict[str, nn.Module] = OrderedDict()
    sequence["embedding"] = embedding = SourceEmbedding(vocabulary, width, length, pad, shared=shared_embedding)
    for index in range(layers):
        sequence[f"encoder_{index:02d}"] = make(EncoderLayer, *sizes, causal=False, feed_forward_scale=scale)
    sequence["encoder_norm"] = EncoderNorm(width)
    embeds_target: Embedding = embedding
    if not shared_embedding:
        sequence["target_embedding"] = embeds_target = TargetEmbedding(vocabulary, width, length)
        if share_vocabularies:
            embeds_target.weight = embedding.weight
    decoder_layer = partial(DecoderLayer, *sizes, causal=True, cross=True, feed_forward_scale=scale)
    for index in range(layers - 1):
        sequence[f"decoder_{index:02d}"] = make(decoder_layer)
    sequence[f"decoder_{layers - 1:02d}"] = last = decoder_layer()
    last.last = True
    sequence["softmax"] = softmax = Softmax(width, vocabulary, logit_clip)
    if tie_embeddings:
        softmax.logits.weight = embeds_target.weight
    return nn.Sequential(sequence)
