"""What the last stage computes from the model's outputs: the loss that is minimised, and the counts of a step.

A micro-batch's loss is a sum over its elements (images, or tokens) divided by the *mini-batch's* number of elements.
Uneven micro-batches and padding then weigh exactly as in one big batch, the gradients need no scaling afterwards, and
the denominator is known before the first action. Averages of averages, as other programs take them, are wrong if two
micro-batches differ in size.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from operator import add

import torch
from torch.nn import functional as F

from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.pipeline.runtime.boundary import Tensors
from gpipe_cli.pipeline.runtime.host_copies import to_device, to_host


@dataclass(frozen=True)
class Totals:
    """Sums over elements, so that they add up over micro-batches and mini-batches in any grouping."""

    elements: int  # images; or tokens that were to be predicted, without padding
    loss: float
    cross_entropy: float
    top1: float
    top5: float  # images only

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*map(add, astuple(self), astuple(other)))

    @property
    def means(self) -> tuple[float, float, float, float]:
        """Loss, cross-entropy, top-1 and top-5 of an element."""
        n = self.elements
        return self.loss / n, self.cross_entropy / n, self.top1 / n, self.top5 / n


class CrossEntropy:
    """Cross entropy with label smoothing, plus `auxiliary_weight` times that of the auxiliary head's logits, if any.

    `targets` are the classes (N,) of the mini-batch, or its tokens (N, T) with IGNORED where there is nothing to
    predict; logits have the classes behind those dimensions. `sizes` are its micro-batches; they may be a part of a
    mini-batch that has `elements` in all. `device` is where the logits will be. Smoothing spreads over all classes, as
    TensorFlow and torch do it (paper v4: 0.1; the auxiliary head's weight of 0.4: TPU code, Real et al.).
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
        self._of_all = elements or self._elements
        pieces = to_device(targets, device or targets.device).split(list(sizes))
        self._targets = [piece.clone() for piece in pieces]  # a slice would keep the targets of the whole mini-batch
        self._ranks = 1 if targets.ndim > 1 else 5  # top-5 is for images only
        self._smoothing, self._auxiliary_weight = label_smoothing, auxiliary_weight
        self._counted: list[torch.Tensor] = []
        self._plain = torch.zeros(())  # cross entropy without smoothing, of the last micro-batch

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        loss, self._plain = _weighted(outputs, self._targets[micro_batch], self._smoothing, self._auxiliary_weight)
        return loss / self._of_all

    @torch.no_grad()
    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        logits, targets = outputs[0], self._targets[micro_batch]
        ranks = min(self._ranks, logits.shape[-1])
        best = logits.argmax(-1, keepdim=True) if ranks == 1 else logits.topk(ranks, dim=-1).indices
        right = best == targets[..., None]
        counted = loss.double() * self._of_all, self._plain.double(), right[..., 0].sum().double(), right.sum().double()
        # stays on the device: reading it here would make the pipeline wait for this micro-batch
        self._counted.append(torch.stack(counted))

    def totals(self) -> Totals:
        """The sums over the mini-batch; on a GPU this waits for it."""
        return self.begin_totals()()

    def begin_totals(self) -> Callable[[], Totals]:
        """After the last micro-batch: `totals`, for which what is returned waits."""
        if not self._counted:  # this replica had no sample
            return lambda: Totals(0, 0.0, 0.0, 0.0, 0.0)
        counted = to_host(torch.stack(self._counted))

        def totals() -> Totals:
            loss, plain, top1, top5 = (sum(column) for column in zip(*counted().tolist(), strict=True))
            return Totals(self._elements, loss, plain, top1, top5)

        return totals


def loss_of_shapes(label_smoothing: float, auxiliary_weight: float) -> Callable[[Tensors], torch.Tensor]:
    """The loss of logits on the meta device, to count what it costs."""

    def loss(outputs: Tensors) -> torch.Tensor:
        targets = torch.empty(outputs[0].shape[:-1], dtype=torch.int64, device=outputs[0].device)
        return _weighted(outputs, targets, label_smoothing, auxiliary_weight)[0] / max(1, targets.numel())

    return loss


def _weighted(
    outputs: Tensors, targets: torch.Tensor, smoothing: float, auxiliary_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum that is minimised, and that of the plain cross entropy of the main logits."""
    logits, *auxiliary = outputs
    loss, plain = _summed(logits, targets, smoothing)
    for other in auxiliary:
        loss = loss + auxiliary_weight * _summed(other, targets, smoothing)[0]
    return loss, plain.detach()


def _summed(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy smoothed and plain, of one pass over the vocabulary; the operations are those of torch's own."""
    logits, targets = logits.float().flatten(0, -2), targets.flatten()
    if not smoothing:
        plain = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return plain, plain
    logarithms = F.log_softmax(logits, dim=1)
    plain = F.nll_loss(logarithms, targets, reduction="sum", ignore_index=IGNORED)
    uniform = -logarithms.sum(dim=1).masked_fill(targets == IGNORED, 0.0)
    return (1 - smoothing) * plain + uniform.sum() * (smoothing / logits.shape[1]), plain
