"""What the last stage computes from the model's outputs: the loss that is minimised, and what is counted on the way.

A micro-batch's loss is a sum over its samples divided by the *mini-batch's* number of samples. Uneven micro-batches
then weigh exactly as in one big batch, the gradients need no scaling afterwards, and the denominator is known before
the first action. Averages of averages, as peers take them, are wrong as soon as two micro-batches differ in size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from gpipe_cli.pipeline.micro_batch import Tensors, split


@dataclass(frozen=True)
class Totals:
    """Sums over samples, so that they add up over micro-batches and mini-batches in any grouping."""

    samples: int
    loss: float
    cross_entropy: float
    top1: float
    top5: float

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.samples + other.samples,
            self.loss + other.loss,
            self.cross_entropy + other.cross_entropy,
            self.top1 + other.top1,
            self.top5 + other.top5,
        )


class Classification:
    """Cross entropy with label smoothing, plus `auxiliary_weight` times that of the auxiliary head's logits if there
    are.

    `targets` (N,) are the classes of the mini-batch and `sizes` its micro-batches. Smoothing spreads over all classes,
    as TensorFlow and torch do it (paper v4: 0.1; the auxiliary head's weight of 0.4: TPU code, Real et al.).
    """

    def __init__(
        self, targets: torch.Tensor, sizes: Sequence[int], *, label_smoothing: float, auxiliary_weight: float
    ) -> None:
        self._targets = split(targets, sizes)
        self._samples = len(targets)
        self._smoothing, self._auxiliary_weight = label_smoothing, auxiliary_weight
        self._counted: list[torch.Tensor] = []

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        logits, *auxiliary = outputs
        targets = self._targets[micro_batch]
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=self._smoothing, reduction="sum")
        for other in auxiliary:
            extra = F.cross_entropy(other.float(), targets, label_smoothing=self._smoothing, reduction="sum")
            loss = loss + self._auxiliary_weight * extra
        return loss / self._samples

    @torch.no_grad()
    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        logits, targets = outputs[0].float(), self._targets[micro_batch]
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        plain = F.cross_entropy(logits, targets, reduction="sum")
        # stays on the device: reading it here would make the pipeline wait for this micro-batch
        self._counted.append(
            torch.stack([loss.double() * self._samples, plain.double(), best[:, 0].sum().double(), best.sum().double()])
        )

    def totals(self) -> Totals:
        """Read the sums over the mini-batch; on a GPU this waits for it."""
        rows = torch.stack(self._counted).cpu().tolist()
        loss, plain, top1, top5 = (sum(column) for column in zip(*rows, strict=True))
        return Totals(self._samples, loss, plain, top1, top5)
