"""The Transformer whose size grows with the accelerators (Table 1, right half, and Table 2 of the paper).

The paper calls it a sequence-to-sequence model, but the parameters that it prints are those of a language model, one
stack of L layers, with separate matrices for embedding and softmax and with biases everywhere: 282.2M, 785.8M, 5.3B,
21.0B and 83.9B for L = 3, 13, 103, 415 and 1663. Lingvo's own language model for GPipe is built the same way.

    embedding  layer_000 ... layer_{L-1}  softmax
"""

from collections import OrderedDict

from torch import nn

from gpipe_cli.models.transformer import Embedding, SelfAttentionLayer, Softmax


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
) -> nn.Sequential:
    """Build the network: tokens (N, S), int64, S up to `length` -> logits (N, S, vocabulary) for the token after each.

    The defaults are Table 1's; the paper gives no dropout, 0.1 is Lingvo's.

    Args:
        layers: L, the layers between embedding and softmax.
        width: entries of a token's vector; the heads share them.
        hidden: entries between the two maps of a feed-forward part.
        vocabulary: tokens are 0 to vocabulary - 1.
        length: the longest sequence, tokens.
        dropout: probability to drop an entry of what a part of a layer adds.
        attention_dropout: probability to drop an attention weight.

    Raises:
        ValueError: an odd width, or heads that do not divide it.
    """
    if width % heads:
        raise ValueError(
            f"model.width={width} does not divide among model.heads={heads}; use a multiple of {heads} as the width"
        )
    sequence: OrderedDict[str, nn.Module] = OrderedDict()
    sequence["embedding"] = Embedding(vocabulary, width, length)
    for index in range(layers):
        sequence[f"layer_{index:03d}"] = SelfAttentionLayer(
            width, hidden, heads, width // heads, dropout, attention_dropout, causal=True
        )
    sequence["softmax"] = Softmax(width, vocabulary)
    return nn.Sequential(sequence)
