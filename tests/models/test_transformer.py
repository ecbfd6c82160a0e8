"""The parts of the Transformers against formulas written out here, and what a pipeline asks of both networks."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.models.transformer import Attention, Embedding, FeedForward, Projection, Softmax, sinusoids
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.models.transformer_nmt import transformer_nmt
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import as_boundary
from gpipe_cli.pipeline.runtime.materialize import materialize

VOCABULARY = 50
Values = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def language_model(dropout: float = 0.3, layers: int = 3) -> nn.Sequential:
    return transformer_lm(
        layers=layers,
        width=16,
        hidden=32,
        heads=4,
        vocabulary=VOCABULARY,
        length=12,
        dropout=dropout,
        attention_dropout=dropout,
    )


def translator(dropout: float = 0.3, layers: int = 2, *, shared: bool = True) -> nn.Sequential:
    return transformer_nmt(
        layers=layers,
        width=16,
        hidden=32,
        heads=4,
        head_width=8,
        vocabulary=VOCABULARY,
        length=12,
        dropout=dropout,
        attention_dropout=dropout,
        depth_scaled=True,
        logit_clip=0.0,
        shared_embedding=shared,
    )


def separate_translator(dropout: float = 0.3, layers: int = 2) -> nn.Sequential:
    return translator(dropout, layers, shared=False)


NETWORKS: list[tuple[Callable[..., nn.Sequential], int]] = [
    (language_model, 1),
    (translator, 2),
    (separate_translator, 2),
]


def sentences(count: int, length: int = 9) -> Values:
    """`count` batches of three sequences of tokens; in those of several, the second sequence ends early."""
    batches = tuple(torch.randint(1, VOCABULARY, (3, length - index)) for index in range(count))
    for batch in batches[: count - 1]:
        batch[1, 6:] = 0
    return batches


def as_tuple(value: Tensor | Values) -> Values:
    return value if isinstance(value, tuple) else (value,)


def as_value(values: Values) -> Tensor | Values:
    return values[0] if len(values) == 1 else values


# The parts.


def test_positions() -> None:
    waves = sinusoids(7, torch.empty(2, 7, 6))
    for position in range(7):
        for column in range(3):
            angle = position / 10000 ** (2 * column / 6)
            assert waves[position, column].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert waves[position, 3 + column].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_embedding_scales_its_vectors_and_adds_positions() -> None:
    embedding = Embedding(VOCABULARY, 16, 12)
    tokens = torch.randint(0, VOCABULARY, (2, 5))
    expected = 4 * embedding.weight[tokens] + sinusoids(5, torch.empty(16))
    torch.testing.assert_close(embedding(tokens), expected)
    with pytest.raises(ValueError, match=r"model\.length=12: a sequence has 13 tokens"):
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


def test_attention_drops_weights_in_training_only() -> None:
    attention = Attention(6, heads=2, head_width=5, dropout=0.5)
    x = torch.randn(2, 4, 6)
    assert not torch.equal(attention(x, x), attention(x, x))
    attention.eval()
    assert torch.equal(attention(x, x), attention(x, x))


def test_initial_weights() -> None:
    projection = Projection(300, 500, scale=0.25)
    bound = 0.25 * math.sqrt(6 / 800)
    assert projection.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert projection.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not projection.bias.any()
    embedding = Embedding(500, 400, 1)
    assert embedding.weight.std().item() == pytest.approx(1 / 20, rel=0.02)
    part = FeedForward(64, 128, scale=1 / 6)
    assert part.inner.weight.abs().max().item() == pytest.approx(math.sqrt(6 / 192) / 6, rel=0.01)
    assert part.outer.weight.abs().max().item() == pytest.approx(math.sqrt(6 / 192) / 6, rel=0.01)


def test_logits_are_clipped() -> None:
    free, clipped = Softmax(8, VOCABULARY), Softmax(8, VOCABULARY, clip=0.5)
    clipped.load_state_dict(free.state_dict())
    x = torch.randn(2, 3, 8)
    assert free(x).abs().max() > 0.5
    assert torch.equal(clipped(x), free(x).clamp(-0.5, 0.5))


# Both networks.


@pytest.mark.parametrize(("build", "count"), NETWORKS)
def test_initial_loss_is_that_of_a_guess(build: Callable[..., nn.Sequential], count: int) -> None:
    inputs = sentences(count)
    logits = build(dropout=0.0)(as_value(inputs))
    assert logits.shape == (*inputs[-1].shape, VOCABULARY)
    targets = torch.randint(0, VOCABULARY, inputs[-1].shape)
    assert F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() == pytest.approx(math.log(50), rel=0.15)


@pytest.mark.parametrize(("build", "count"), NETWORKS)
def test_nobody_sees_the_future(build: Callable[..., nn.Sequential], count: int) -> None:
    model = build().eval()
    inputs = sentences(count)
    changed = inputs[-1].clone()
    changed[:, 5] = changed[:, 5] % (VOCABULARY - 1) + 1
    before, after = model(as_value(inputs)), model(as_value((*inputs[:-1], changed)))
    assert torch.equal(before[:, :5], after[:, :5])
    assert all((before[:, position] != after[:, position]).any() for position in range(5, before.shape[1]))


@pytest.mark.parametrize(("build", "count"), NETWORKS)
def test_gradients_reach_every_parameter(build: Callable[..., nn.Sequential], count: int) -> None:
    model = build()
    model(as_value(sentences(count))).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A bias of the keys shifts all scores of a query alike: only rounding gives it a gradient.
        assert parameter.grad.any() or name.endswith("key.bias"), name


def run_in_pieces(model: nn.Sequential, inputs: Values, cuts: set[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward with a cut before each layer of `cuts`, where values start anew and gradients are handed on.

    Every layer gets a seed of its own; the loss is a weighted sum of the logits.
    """
    pieces: list[tuple[Values, Values]] = []
    values = first = inputs
    for number, layer in enumerate(model):
        if number in cuts:
            pieces.append((first, values))
            values = first = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in values)
        torch.manual_seed(number)
        values = as_tuple(layer(as_value(values)))
    logits = values[0]
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    torch.autograd.backward(logits, weights)
    for received, sent in reversed(pieces):
        wanted = [index for index, tensor in enumerate(sent) if tensor.requires_grad]
        torch.autograd.backward([sent[index] for index in wanted], [first[index].grad for index in wanted])
        first = received
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return logits.detach(), gradients


@pytest.mark.parametrize(("build", "count"), NETWORKS)
def test_cuts_change_no_bit(build: Callable[..., nn.Sequential], count: int) -> None:
    model = build()
    inputs = sentences(count)
    before = [tensor.clone() for tensor in inputs]
    whole, gradients = run_in_pieces(model, inputs, set())
    everywhere = set(range(1, len(model)))
    for cuts in [everywhere, *({cut} for cut in everywhere)]:
        logits, pieced = run_in_pieces(model, inputs, cuts)
        assert torch.equal(logits, whole), cuts
        assert pieced.keys() == gradients.keys()
        assert [name for name in gradients if not torch.equal(gradients[name], pieced[name])] == [], cuts
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    torch.manual_seed(99)
    assert not torch.equal(model(as_value(inputs)), whole), "dropout is on"


@pytest.mark.parametrize(("build", "count"), NETWORKS)
def test_layers_leave_their_inputs_alone(build: Callable[..., nn.Sequential], count: int) -> None:
    values = sentences(count)
    for name, layer in build().named_children():
        copies = [tensor.clone() for tensor in values]
        results = as_tuple(layer(as_value(values)))
        assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True)), name
        values = results


@pytest.mark.parametrize(("build", "count"), NETWORKS)
def test_layers_initialise_themselves(build: Callable[..., nn.Sequential], count: int) -> None:
    """Built without memory, each layer made real by itself: every weight is set, wherever the first cut lies."""

    def real(first: int, layers: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = build()
        return materialize(model, first, layers, run_seed=3, device=torch.device("cpu")).state_dict()

    number = len(build())
    whole, later = real(0, number), real(2, number - 2)
    assert all(tensor.isfinite().all() for tensor in whole.values())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in later.items())
    assert len(later) < len(whole)
    assert not any(True for _ in build().buffers())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("build", "count"), NETWORKS)
def test_costs_come_from_shapes(build: Callable[..., nn.Sequential], count: int, dropout: float) -> None:
    with torch.device("meta"):
        model = build(dropout)
        inputs = sentences(count)
    costs = trace_layers(model, as_boundary(inputs), training=True)
    assert [cost.name for cost in costs] == [name for name, _ in model.named_children()]
    source, target = inputs[0].shape[1], inputs[-1].shape[1]
    feed_forward, maps = 2 * 2 * 16 * 32, 4 * 2 * 16 * (32 if count == 2 else 16)
    channels = maps // (4 * 2 * 16)
    expected = {
        "layer": source * (maps + feed_forward) + 4 * source * source * channels,
        "encoder": source * (maps + feed_forward) + 4 * source * source * channels,
        "decoder": target * (1.5 * maps + feed_forward) + source * maps / 2 + 4 * target * (source + target) * channels,
        "softmax": 2 * target * 16 * VOCABULARY,
    }
    for cost in costs:
        kind = cost.name.split("_")[0]
        if "embedding" in cost.name or "norm" in cost.name:
            assert cost.flops == 0
        else:
            assert cost.forward.flops == expected[kind], cost.name
            # Fused attention computes its scores a second time in the backward.
            assert 2 * cost.forward.flops <= cost.backward.flops <= 2.3 * cost.forward.flops, cost.name
    floats = [[tensor.has_gradient for tensor in cost.outputs] for cost in costs[:-1]]
    dtypes = [[tensor.dtype for tensor in cost.outputs] for cost in costs[:-1]]
    for gradients, kinds in zip(floats, dtypes, strict=True):
        assert gradients == [kind == torch.float32 for kind in kinds]
