"""The translation Transformers T(L, H, A) of Section 5: L encoder and L decoder layers as one sequence.

    embedding  encoder_00 ... encoder_norm [target_embedding]  decoder_00 ... softmax

A pipeline runs its stages one after the other, so the target passes through the encoder, as the decoder needs it, and
the encoded source through the decoder, as every layer of it does. Between layers is always the tuple

    source (N, S, width), source mask (N, S) bool, target (N, T, width) -- or (N, T) int64 while it is not yet embedded

With `shared_embedding`, one matrix embeds both languages in the first layer. Otherwise the target's own matrix stands
where the decoder begins and only token numbers pass the encoder. Either way no parameter belongs to two layers.

The paper prints 400M, 1.3B, 1.3B, 3B and 6B parameters. The width of the attention grows with the heads (64 channels
each): with 1024 channels for all, T(64, 16384, 32) would have 5.2B. Neither dropout nor the threshold of the logits are
given: both are free choices.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from gpipe_cli.models.transformer import Attention, Embedding, FeedForward, SelfAttentionLayer, Softmax


class SourceEmbedding(Embedding):
    """Takes (source (N, S), target (N, T)) and embeds the source and, if `shared`, the target, too."""

    def __init__(self, vocabulary: int, width: int, length: int, pad: int, *, shared: bool) -> None:
        super().__init__(vocabulary, width, length)
        self.pad, self.shared = pad, shared

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]  # of tuples
        source, target = inputs
        if not self.shared:
            return super().forward(source), source != self.pad, target
        # One look-up for both: two would each bring a gradient as large as the matrix.
        vectors = nn.Embedding.forward(self, torch.cat([source, target], dim=1))
        source_vectors, target_vectors = vectors.split([source.shape[1], target.shape[1]], dim=1)
        return self.with_positions(source_vectors), source != self.pad, self.with_positions(target_vectors)


class TargetEmbedding(Embedding):
    """Takes (source, mask, target (N, T) int64) and embeds the target."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]  # of tuples
        source, mask, target = inputs
        return source, mask, super().forward(target)


class EncoderLayer(SelfAttentionLayer):
    """Self-attention over the real tokens of the source, and feed-forward; the target is passed on."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]  # of tuples
        source, mask, target = inputs
        return super().forward(source, mask), mask, target


class EncoderNorm(nn.LayerNorm):
    """Normalises the encoded source once for all decoder layers."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]  # of tuples
        source, mask, target = inputs
        return super().forward(source), mask, target


class DecoderLayer(nn.Module):
    """The target attends to what is before it, then to the source, then feed-forward; the source is passed on.

    Padding at the end of a target needs no mask: no real token comes after it. The last layer returns the target alone,
    (N, T, width): no later layer needs the source.
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
        feed_forward_scale: float,
        last: bool,
    ) -> None:
        super().__init__()
        self.last = last
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, head_width, attention_dropout)
        self.source_attention_norm = nn.LayerNorm(width)
        self.source_attention = Attention(width, heads, head_width, attention_dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden, feed_forward_scale)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        source, mask, x = inputs
        normalised = self.attention_norm(x)
        x = x + self.dropout(self.attention(normalised, normalised, causal=True))
        x = x + self.dropout(self.source_attention(self.source_attention_norm(x), source, mask))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x if self.last else (source, mask, x)


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
    pad: int = 0,
) -> nn.Sequential:
    """Build the network: (source (N, S), target so far (N, T)), both int64 -> logits (N, T, vocabulary).

    Logits at t are for the target's token behind the given tokens 0 to t. S and T are at most `length`.

    Args as those of `transformer_lm` (hidden is H, heads is A), and:
        layers: L, of the encoder and again of the decoder.
        head_width: channels of one attention head.
        depth_scaled: whether the initial weights of all feed-forward parts are divided by L (the paper's first remedy
            against divergence, after Fixup).
        logit_clip: the largest magnitude of a logit (its second remedy; Lingvo's `logits_abs_max`); 0 is off.
        shared_embedding: whether one matrix embeds source and target.
        pad: the token that fills up sentences. Padded source positions are masked.

    Raises:
        ValueError: an odd width.
    """
    scale = 1 / layers if depth_scaled else 1.0
    sizes = (width, hidden, heads, head_width, dropout, attention_dropout)
    sequence: OrderedDict[str, nn.Module] = OrderedDict()
    sequence["embedding"] = SourceEmbedding(vocabulary, width, length, pad, shared=shared_embedding)
    for index in range(layers):
        sequence[f"encoder_{index:02d}"] = EncoderLayer(*sizes, causal=False, feed_forward_scale=scale)
    sequence["encoder_norm"] = EncoderNorm(width)
    if not shared_embedding:
        sequence["target_embedding"] = TargetEmbedding(vocabulary, width, length)
    for index in range(layers):
        sequence[f"decoder_{index:02d}"] = DecoderLayer(*sizes, feed_forward_scale=scale, last=index == layers - 1)
    sequence["softmax"] = Softmax(width, vocabulary, logit_clip)
    return nn.Sequential(sequence)
