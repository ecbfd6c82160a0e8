"""The loss that the last stage minimises, and the sums of loss and correct predictions that a step reports.

A micro-batch's loss is a sum over its elements (images, or tokens) divided by the *mini-batch's* number of elements.
Uneven micro-batches and padding then weigh exactly as in a single big batch, gradients need no rescaling, and the
denominator is known before the first action. Averaging the averages of micro-batches, as other programs do, is wrong
if two micro-batches differ in size.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from operator import add

import torch
from torch.nn import functional as F

from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.pipeline.runtime.boundary import Tensors
from gpipe_cli.system.accelerator import copy_to_host_async, to_device


@dataclass(frozen=True)
class Totals:
    """Sums over elements, so that they add up over micro-batches and mini-batches in any grouping."""

    elements: int  # images, pixels with a class, or target tokens without padding
    loss: float
    cross_entropy: float
    top1: float
    top5: float  # images only

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*map(add, astuple(self), astuple(other)))

    @property
    def means(self) -> tuple[float, float, float, float]:
        """Loss, cross-entropy, top-1 and top-5 per element; 0 where there is none."""
        n = max(1, self.elements)
        return self.loss / n, self.cross_entropy / n, self.top1 / n, self.top5 / n


NO_TOTALS = Totals(0, 0.0, 0.0, 0.0, 0.0)


class CrossEntropy:
    """Cross entropy with label smoothing, plus `auxiliary_weight` times the auxiliary head's, if any.

    `targets` are the mini-batch's classes (N,), its tokens (N, T), or its masks (N, H, W), with IGNORED where there is
    nothing to predict; logits are (N, C), (N, T, C) or (N, C, H, W). `sizes`: samples of each micro-batch. `elements`:
    the number in the whole mini-batch, if `targets` is only a part of it; if it is 0, loss and gradients are 0.
    `device`: the logits'. Smoothing is uniform over all classes, as in TensorFlow and torch (paper v4: 0.1; the
    auxiliary head's weight of 0.4: TPU code, Real et al.).
    """

    def __init__(
        self,
        targets: torch.Tensor,
        sizes: Sequence[int],
        *,
        label_smoothing: float,
        auxiliary_weight: float,
        elements: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._elements = int((targets != IGNORED).sum())  # counted on the CPU: nothing waits for a GPU
        self._of_all = max(1, elements or self._elements)  # 0 / 0 would make all weights NaN
        pieces = to_device(targets, device or targets.device).split(list(sizes))
        self._targets = [piece.clone() for piece in pieces]  # a view would keep the whole mini-batch's alive
        self._ranks = 1 if targets.ndim > 1 else 5  # top-5 is for images only
        self._smoothing, self._auxiliary_weight = label_smoothing, auxiliary_weight
        self._plain = torch.zeros(())  # the last micro-batch's cross entropy without smoothing
        self._observed: list[tuple[torch.Tensor, torch.Tensor]] = []  # loss and plain cross entropy of each micro-batch
        self._right: list[torch.Tensor] = []  # (elements, ranks) of each micro-batch: whether the class is the target

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        loss, self._plain = _weighted_loss(outputs, self._targets[micro_batch], self._smoothing, self._auxiliary_weight)
        return loss / self._of_all

    @torch.no_grad()
    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        logits, targets = _classes_last(outputs[0]), self._targets[micro_batch]
        ranks = min(self._ranks, logits.shape[-1])
        best = logits.argmax(-1, keepdim=True) if ranks == 1 else logits.topk(ranks, dim=-1).indices
        # stays on the device: reading it here would make the pipeline wait for this micro-batch
        self._right.append((best == targets[..., None]).flatten(0, -2))
        self._observed.append((loss, self._plain))

    def totals(self) -> Totals:
        """The sums over the mini-batch; on a GPU this waits for the device."""
        return self.totals_async()()

    def totals_async(self) -> Callable[[], Totals]:
        """Called after the last micro-batch: starts copying the sums to the host; the returned function awaits them."""
        if not self._observed:  # this replica had no sample
            return lambda: NO_TOTALS
        elements, of_all = self._elements, self._of_all  # not self, which has targets on a GPU
        losses, plains = zip(*self._observed, strict=True)
        sums = torch.stack((*losses, *plains))
        right = torch.cat(self._right).sum(dim=0)
        counted = copy_to_host_async(torch.cat((sums.double(), right.double())))
        sizes = len(losses), len(plains), len(right)

        def totals() -> Totals:
            loss, plain, ranked = (part.tolist() for part in counted().split(sizes))
            return Totals(elements, sum(value * of_all for value in loss), sum(plain), ranked[0], sum(ranked))

        return totals


def loss_of_shapes(label_smoothing: float, auxiliary_weight: float) -> Callable[[Tensors], torch.Tensor]:
    """A loss for outputs on the meta device, from which the planner counts its cost."""

    def loss(outputs: Tensors) -> torch.Tensor:
        shape = _classes_last(outputs[0]).shape[:-1]
        targets = torch.empty(shape, dtype=torch.int64, device=outputs[0].device)
        return _weighted_loss(outputs, targets, label_smoothing, auxiliary_weight)[0] / max(1, targets.numel())

    return loss


def _weighted_loss(
    outputs: Tensors, targets: torch.Tensor, smoothing: float, auxiliary_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum that is minimised, and the sum of the main logits' cross entropy without smoothing; both ()."""
    logits, *auxiliary = outputs
    loss, plain = _summed_cross_entropy(logits, targets, smoothing)
    for other in auxiliary:
        loss = loss + auxiliary_weight * _summed_cross_entropy(other, targets, smoothing)[0]
    return loss, plain.detach()


def _classes_last(logits: torch.Tensor) -> torch.Tensor:
    """The logits with the classes in the last dimension; logits of pixels have them in the second."""
    return logits.movedim(1, -1) if logits.ndim == 4 else logits


def _summed_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross entropy, smoothed and plain, from one log-softmax; computed as `F.cross_entropy` computes it."""
    logits, targets = _classes_last(logits).float().flatten(0, -2), targets.flatten()
    if not smoothing:
        plain = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return plain, plain
    logarithms = F.log_softmax(logits, dim=1)
    plain = F.nll_loss(logarithms, targets, reduction="sum", ignore_index=IGNORED)
    others = logarithms.sum(dim=1).masked_fill(targets == IGNORED, 0.0).sum()
    return (1 - smoothing) * plain + others * (-smoothing / logits.shape[1]), plain
