"""Adafactor (Shazeer and Stern, arXiv 1804.04235) without synchronizing the host with the device.

torch's own reads two norms of every parameter on the host; here they stay on the device. On a CPU the bits are torch's.
"""

from collections.abc import Sequence
from typing import Any

import torch


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` with the same settings and state; parameters must be real and on the same device."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller passes a closure
        for group in self.param_groups:
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            parameters, gradients, rows, columns, variances, steps = lists
            if parameters:
                _update(group, parameters, gradients, list(zip(rows, columns, variances, strict=True)), steps)


def _update(
    group: dict[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    averages: Sequence[tuple[torch.Tensor | None, ...]],
    steps: list[torch.Tensor],
) -> None:
    """`averages` of each squared gradient: row (..., R, 1), column (..., 1, C), None; of a vector None, None, (C,)."""
    rate = group["lr"]
    epsilon, min_scale = group["eps"]
    torch._foreach_add_(steps, 1.0)
    done = [step.item() for step in steps]  # no synchronization: the counters are on the host
    shares = [count ** group["beta2_decay"] for count in done]
    roots = [parameter.numel() ** 0.5 for parameter in parameters]
    min_square = [torch.finfo(p.dtype).eps if epsilon is None else epsilon for p in parameters]

    scales = _clamped_rms(min_scale, torch._foreach_norm(parameters), roots)
    torch._foreach_mul_(scales, [min(rate, 1 / count**0.5) for count in done])
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])

    updates = [_second_moment(*arguments) for arguments in zip(gradients, averages, shares, min_square, strict=True)]
    torch._foreach_clamp_min_(updates, [smallest * smallest for smallest in min_square])
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, gradients)

    too_large = _clamped_rms(1.0, torch._foreach_norm(updates), [root * group["d"] for root in roots])
    factors = torch.stack(scales).neg().div_(torch.stack(too_large)).to(parameters[0].dtype)
    torch._foreach_addcmul_(parameters, updates, factors.unbind())


def _second_moment(
    gradient: torch.Tensor, averages: tuple[torch.Tensor | None, ...], share: float, min_square: float
) -> torch.Tensor:
    """Move the averages by `share` towards the squared gradient; returns their estimate of every element's square."""
    row, column, vector = averages
    if vector is not None:
        return vector.lerp_(gradient * gradient, share).clone()
    assert row is not None
    assert column is not None
    for average, dim in ((row, -1), (column, -2)):
        square_sum = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square_()
        average.lerp_(square_sum.div_(gradient.size(dim)), share)
    return (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=min_square))


def _clamped_rms(minimum: float, norms: Sequence[torch.Tensor], roots: Sequence[float]) -> list[torch.Tensor]:
    """Root mean squares, at least `minimum`: norms over the roots of the numbers of elements; each (), float64."""
    means = list(torch.stack(list(norms)).double().unbind())
    torch._foreach_div_(means, roots)
    torch._foreach_clamp_min_(means, minimum)
    return means
