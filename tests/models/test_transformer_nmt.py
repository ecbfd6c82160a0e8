"""The translation models T(L, H, A): padding, and the two remedies against divergence."""

from typing import Any

import pytest
import torch
from networks import small_transformer
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(shared: bool = True, **settings: Any) -> nn.Sequential:
    return small_transformer("shared embedding" if shared else "separate embeddings", **settings)


def test_one_matrix_embeds_both_languages() -> None:
    model = build()
    source, mask, target = model[0]((torch.tensor([[3, 4, 0]]), torch.tensor([[3, 5]])))
    assert torch.equal(mask, torch.tensor([[True, True, False]]))
    assert torch.equal(source[0, 0], target[0, 0]), "the same token at the same position"
    assert not torch.equal(source[0, 1], target[0, 1])


@pytest.mark.parametrize(("pad", "shared", "training"), [(0, True, False), (7, False, False), (7, True, True)])
def test_padding_changes_nothing(pad: int, shared: bool, training: bool) -> None:
    model = build(shared, pad=pad).train(training)
    source, target = torch.randint(8, 40, (2, 6)), torch.randint(8, 40, (2, 5))
    source[1, 4:] = pad
    wider = [torch.cat([tokens, tokens.new_full((2, 4), pad)], 1) for tokens in (source, target)]
    expected, padded = model((source, target)), model(tuple(wider))[:, :5]
    assert (padded - expected).abs().max() < 1e-6
    alone = model((source[1:, :4], target[1:]))
    assert (alone - expected[1:]).abs().max() < 1e-6


def test_every_real_source_token_counts() -> None:
    model = build().eval()
    source, target = torch.randint(1, 40, (1, 6)), torch.randint(1, 40, (1, 5))
    expected = model((source, target))
    for position in range(6):
        other = source.clone()
        other[0, position] = other[0, position] % 39 + 1
        assert ((model((other, target)) - expected).abs().amax(2) > 1e-4).all(), position


def test_a_sentence_of_nothing_but_padding_stays_finite() -> None:
    """Where a batch is filled up with empty sentences, gradients must not become NaN."""
    model = build()
    source, target = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
    source[0] = 5
    model((source, target))[0].square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for _, parameter in model.named_parameters()
    )


def test_depth_scales_feed_forward_only() -> None:
    assert build(logit_clip=0.25)[-1].clip == 0.25  # the other remedy against divergence

    def weights(depth_scaled: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        return build(layers=5, depth_scaled=depth_scaled).state_dict()

    plain, scaled = weights(False), weights(True)
    divided = [name for name in plain if not torch.equal(plain[name], scaled[name])]
    assert divided == [name for name in plain if ".feed_forward." in name and name.endswith("weight")]
    assert len(divided) == 2 * 2 * 5
    for name in divided:
        torch.testing.assert_close(scaled[name], plain[name] / 5)
