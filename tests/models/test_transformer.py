"""The parts of the Transformers against formulas written out here, and both networks as wholes."""

import math

import pytest
import torch
import torch.nn.functional as F
from networks import KINDS, VOCABULARY, sentences, small_transformer

from gpipe_cli.errors import InputError
from gpipe_cli.models.transformer import (
    Attention,
    Embedding,
    sinusoids,
    transformer_lm,
)
from gpipe_cli.pipeline.runtime.boundary import as_value

# The parts.


def test_positions() -> None:
    angles = torch.tensor([[p / 10000 ** (2 * i / 6) for i in range(3)] for p in range(7)])
    torch.testing.assert_close(sinusoids(7, torch.empty(2, 7, 6)), torch.cat([angles.sin(), angles.cos()], dim=1))


def test_embedding_scales_its_vectors_and_adds_positions() -> None:
    embedding = Embedding(VOCABULARY, 16, 12)
    tokens = torch.randint(0, VOCABULARY, (2, 5))
    expected = 4 * embedding.weight[tokens] + sinusoids(5, torch.empty(16))
    torch.testing.assert_close(embedding(tokens), expected)
    with pytest.raises(InputError, match=r"model\.length=12: a sequence has 13 tokens"):
        embedding(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    """Every head of every position, one sum after the other."""
    attention = Attention(6, heads=2, head_width=5, dropout=0.9).eval()
    x, memory = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    seen = torch.tensor([[True, True, False, True], [True, False, True, True]])
    query, key, value = attention.query(x), attention.key(memory), attention.value(memory)
    mixed = torch.zeros(2, 4, 10)
    for sample in range(2):
        for head in (slice(0, 5), slice(5, 10)):
            for position in range(4):
                allowed = [s for s in range(4) if (s <= position if causal else seen[sample, s])]
                scores = torch.stack([query[sample, position, head] @ key[sample, s, head] for s in allowed])
                weights = (scores / math.sqrt(5)).softmax(0)
                mixed[sample, position, head] = sum(
                    weight * value[sample, s, head] for weight, s in zip(weights, allowed, strict=True)
                )
    result = attention(x, memory, causal=True) if causal else attention(x, memory, seen)
    torch.testing.assert_close(result, attention.output(mixed))
    attention.train()
    assert not torch.equal(attention(x, x), attention(x, x)), "weights are dropped in training"


# Both networks.


@pytest.mark.parametrize("kind", KINDS)
def test_layout_the_loss_of_a_guess_and_no_look_into_the_future(kind: str) -> None:
    model, inputs = small_transformer(kind), sentences(kind)
    between = ["encoder_norm", "target_embedding"][: 2 - (kind == KINDS[1])]
    layers = ["encoder_00", "encoder_01", *between, "decoder_00", "decoder_01"]
    layers = layers if len(inputs) > 1 else ["layer_000", "layer_001", "layer_002"]
    assert [name for name, _ in model.named_children()] == ["embedding", *layers, "softmax"]
    logits = model(as_value(inputs))
    targets = torch.randint(0, VOCABULARY, inputs[-1].shape)
    assert F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() == pytest.approx(math.log(50), rel=0.15)
    changed = inputs[-1].clone()
    changed[:, 5] = changed[:, 5] % (VOCABULARY - 1) + 1
    after = model(as_value((*inputs[:-1], changed)))
    assert torch.equal(logits[:, :5], after[:, :5])
    assert all((logits[:, position] != after[:, position]).any() for position in range(5, logits.shape[1]))


def test_table_1() -> None:
    """The parameters that the paper prints; every layer has as many."""

    def count(layers: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in transformer_lm(layers=layers).parameters())

    without, layer = count(0), count(1) - count(0)
    printed = {3: "282.2M", 13: "785.8M", 103: "5.3B", 415: "21.0B", 1663: "83.9B"}
    for layers, text in printed.items():
        assert f"{(without + layers * layer) / (1e6 if text.endswith('M') else 1e9):.1f}{text[-1]}" == text


# Translation.


@pytest.mark.parametrize(("pad", "kind"), [(0, KINDS[1]), (7, KINDS[2])])
def test_padding_changes_nothing(pad: int, kind: str) -> None:
    model = small_transformer(kind, pad=pad)
    source, target = torch.randint(8, 40, (2, 6)), torch.randint(8, 40, (2, 5))
    source[1, 4:] = pad
    wider = [torch.cat([tokens, tokens.new_full((2, 4), pad)], 1) for tokens in (source, target)]
    expected, padded = model((source, target)), model(tuple(wider))[:, :5]
    assert (padded - expected).abs().max() < 1e-6
    alone = model((source[1:, :4], target[1:]))
    assert (alone - expected[1:]).abs().max() < 1e-6


def test_a_sentence_of_nothing_but_padding_stays_finite() -> None:
    """Where a batch is filled up with empty sentences, gradients must not become NaN."""
    model = small_transformer(KINDS[1])
    source, target = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
    source[0] = 5
    model((source, target))[0].square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())  # type: ignore[union-attr]


def test_depth_scales_feed_forward_only() -> None:
    plain = small_transformer(KINDS[1], layers=5).state_dict()
    torch.manual_seed(0)
    scaled = small_transformer(KINDS[1], layers=5, depth_scaled=True).state_dict()
    divided = {name for name in plain if ".feed_forward." in name and name.endswith("weight")}
    assert len(divided) == 2 * 2 * 5
    for name, tensor in plain.items():
        torch.testing.assert_close(scaled[name], tensor / 5 if name in divided else tensor)
    assert small_transformer(KINDS[1], logit_clip=0.25)[-1].clip == 0.25  # the other remedy against divergence
