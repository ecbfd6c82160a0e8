"""The loss of a mini-batch does not know how it was cut into micro-batches."""

import pytest
import torch
from torch.nn import functional as F

from gpipe_cli.assembly.loss import NO_TOTALS, CrossEntropy, Totals
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.pipeline.runtime.boundary import split_all

N, CLASSES = 11, 7


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, also of the auxiliary head, and targets: the same in each call."""
    generator = torch.Generator().manual_seed(3)
    logits, auxiliary = (torch.randn(N, CLASSES, generator=generator).requires_grad_() for _ in range(2))
    return logits, auxiliary, torch.randint(CLASSES, (N,), generator=generator)


def run(micro_batches: int, smoothing: float, weight: float, *, auxiliary: bool) -> tuple[list[torch.Tensor], Totals]:
    logits, extra, targets = batch()
    outputs = (logits, extra) if auxiliary else (logits,)
    sizes = micro_batch_sizes(N, micro_batches)
    objective = CrossEntropy(targets, sizes, label_smoothing=smoothing, auxiliary_weight=weight)
    total = torch.zeros(())
    for m, parts in enumerate(split_all(outputs, sizes)):
        loss = objective.loss(m, parts)
        objective.observe(m, parts, loss.detach())
        total = total + loss
    total.backward()  # type: ignore[no-untyped-call]
    return [total.detach(), *(output.grad for output in outputs if output.grad is not None)], objective.totals()


@pytest.mark.parametrize(
    ("micro_batches", "smoothing", "auxiliary"), [(1, 0.1, False), (3, 0.0, True), (11, 0.1, True)]
)
def test_the_sum_over_micro_batches_is_torchs_mean_over_the_mini_batch(
    micro_batches: int, smoothing: float, auxiliary: bool
) -> None:
    found, _ = run(micro_batches, smoothing, 0.4, auxiliary=auxiliary)
    logits, extra, targets = batch()
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    if auxiliary:
        expected = expected + 0.4 * F.cross_entropy(extra, targets, label_smoothing=smoothing)
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = [logits.grad, extra.grad] if auxiliary else [logits.grad]
    torch.testing.assert_close(found, [expected.detach(), *gradients], atol=1e-7, rtol=1e-5)


def test_what_is_counted() -> None:
    _, totals = run(4, 0.1, 0.4, auxiliary=True)
    logits, extra, targets = batch()
    order = logits.argsort(dim=1, descending=True).tolist()
    assert totals.elements == N
    assert totals.top1 == sum(row[0] == target for row, target in zip(order, targets.tolist(), strict=True))
    assert totals.top5 == sum(target in row[:5] for row, target in zip(order, targets.tolist(), strict=True))
    assert 0 < totals.top1 < totals.top5 < N
    plain = F.cross_entropy(logits, targets, reduction="sum")
    smoothed = [F.cross_entropy(x, targets, label_smoothing=0.1, reduction="sum") for x in (logits, extra)]
    assert totals.cross_entropy == pytest.approx(plain.item(), rel=1e-6)
    assert totals.loss == pytest.approx((smoothed[0] + 0.4 * smoothed[1]).item(), rel=1e-6)


def test_fewer_than_five_classes_count_for_top5() -> None:
    objective = CrossEntropy(torch.tensor([0, 1, 2]), (3,), label_smoothing=0, auxiliary_weight=0)
    objective.observe(0, (torch.randn(3, 3),), torch.zeros(()))
    assert objective.totals().top5 == 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_pixels_are_elements_wherever_a_mask_is_cut(smoothing: float) -> None:
    """Logits (N, C, H, W): torch's mean over all pixels that have a class, and as many right as `argmax` has."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, CLASSES, 4, 3, generator=generator).requires_grad_()
    targets = torch.randint(CLASSES, (N, 4, 3), generator=generator)
    targets[2, :2] = IGNORED
    sizes = micro_batch_sizes(N, 3)
    objective = CrossEntropy(targets, sizes, label_smoothing=smoothing, auxiliary_weight=0.0)
    total = torch.zeros(())
    for m, parts in enumerate(split_all((logits,), sizes)):
        loss = objective.loss(m, parts)
        objective.observe(m, parts, loss.detach())
        total = total + loss
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(total, expected)
    found, wanted = (torch.autograd.grad(one, logits)[0] for one in (total, expected))
    torch.testing.assert_close(found, wanted)
    totals = objective.totals()
    assert totals.elements == N * 12 - 6
    assert totals.top1 == (logits.argmax(1) == targets).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mini_batch_without_a_valid_target_counts_as_zero(smoothing: float) -> None:
    """Masks of 255 only: 0 / 0 went into the weights, and the run ended as diverged."""
    outputs = tuple(torch.randn(N, CLASSES, 4, 3).requires_grad_() for _ in range(2))
    targets = torch.full((N, 4, 3), IGNORED)
    objective = CrossEntropy(targets, (N,), label_smoothing=smoothing, auxiliary_weight=0.4)
    loss = objective.loss(0, outputs)
    objective.observe(0, outputs, loss.detach())
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, outputs))
    totals = objective.totals()
    assert totals == NO_TOTALS
    assert totals.means == (0, 0, 0, 0)
