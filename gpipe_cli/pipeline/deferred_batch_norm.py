"""Batch norm under micro-batches: normalize per micro-batch, track statistics per mini-batch (paper sections 2.2 and
6).

Every micro-batch writes its own mean and variance into its own slot; `commit` merges the slots once per mini-batch. A
recomputation writes nothing, so nothing can be counted twice, and uneven or short mini-batches need no counting of
calls. The merged variance is the unbiased one of the whole mini-batch, as in `nn.BatchNorm`: with the same inputs the
running statistics are those of one big batch.

Departs from the paper: Lingvo (`core/bn_layers.py`) and torchgpipe keep the biased variance.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_cli.pipeline.frozen import keep_mark


class BatchStatistics:
    """The slots of all batch norms of one stage: for each micro-batch one flat tensor (2, channels of all norms).

    One flat tensor, so that a commit costs a dozen operations a stage and not a dozen a norm.
    """

    def __init__(self) -> None:
        self._norms: list[DeferredBatchNorm] = []
        self._offsets: list[int] = [0]
        self._slots: list[torch.Tensor] = []
        self._views: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each slot, for each norm: mean, variance
        self._counts: list[dict[int, int]] = []
        self._open: int | None = None
        # of the newest mini-batch: each running statistic that it changed, and the mini-batch's own value of it
        self.newest: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._weights: dict[tuple[tuple[int, ...], ...], tuple[list[torch.Tensor], torch.Tensor]] = {}

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        """The memory that norms have written to so far; it stays from one mini-batch to the next."""
        return self._slots

    def register(self, norm: "DeferredBatchNorm") -> int:
        self._norms.append(norm)
        self._offsets.append(self._offsets[-1] + norm.num_features)
        return len(self._norms) - 1

    def open(self, micro_batch: int) -> None:
        """From here to `close`, training-mode norms record into the slot of `micro_batch`."""
        if not self._norms:
            return
        while len(self._slots) <= micro_batch:
            mean = self._norms[0].running_mean
            assert mean is not None
            slot = torch.zeros(2, self._offsets[-1], dtype=mean.dtype, device=mean.device)
            sizes = [norm.num_features for norm in self._norms]
            self._slots.append(slot)
            self._views.append(list(zip(slot[0].split(sizes), slot[1].split(sizes), strict=True)))
            self._counts.append({})
        self._open = micro_batch

    def close(self) -> None:
        self._open = None

    def slot(self, norm: int, values_per_channel: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where norm number `norm` writes (mean, variance), each (C,); None while nothing is recorded
        (recomputation)."""
        if self._open is None:
            return None
        counts = self._counts[self._open]
        if norm in counts:
            raise ValueError(
                "a batch norm is applied twice in one forward: its statistics per mini-batch would be ambiguous; "
                "use one nn.BatchNorm module per place"
            )
        counts[norm] = values_per_channel
        return self._views[self._open][norm]

    @torch.no_grad()
    def commit(self) -> None:
        """Merge the micro-batches of this mini-batch into the running statistics, exactly, and empty the slots.

        Chan, Golub and LeVeque's pairwise formula in closed form and float64: the mean of squares minus the square of
        the mean would cancel. Each product and each sum is an operation of its own, so that a channel gets the same
        bits wherever it lies in the flat tensor, hence for any cut.
        """
        used = [(slot, counts) for slot, counts in zip(self._slots, self._counts, strict=True) if counts]
        if not used:
            return
        rows = tuple(tuple(counts.get(norm, 0) for norm in range(len(self._norms))) for _, counts in used)
        if rows not in self._weights:
            self._weights[rows] = self._expand(rows, used[0][0].device)
        values, total = self._weights[rows]
        slots_dtype = used[0][0].dtype
        slots = [slot.double() for slot, _ in used]
        mean = torch.zeros_like(total)
        for slot, count in zip(slots, values, strict=True):
            mean += slot[0] * count
        mean /= total
        squares = torch.zeros_like(total)
        for slot, count in zip(slots, values, strict=True):
            squares += slot[1] * (count - 1).clamp_(min=0)
            difference = slot[0] - mean
            squares += difference * difference * count
        variance = squares / (total - 1)
        seen = [any(row[norm] for row in rows) for norm in range(len(self._norms))]
        self._update(mean.to(slots_dtype), variance.to(slots_dtype), seen)
        for _, counts in used:
            counts.clear()

    def is_empty(self) -> bool:
        return self._open is None and not any(self._counts)

    def discard(self) -> None:
        """Forget what was recorded (a step that failed half-way)."""
        self._open = None
        for counts in self._counts:
            counts.clear()

    def _expand(
        self, rows: tuple[tuple[int, ...], ...], device: torch.device
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        channels = torch.tensor([norm.num_features for norm in self._norms])
        values = [torch.tensor(row, dtype=torch.float64).repeat_interleave(channels).to(device) for row in rows]
        total = values[0].clone()
        for row in values[1:]:
            total += row
        return values, total

    def _update(self, mean: torch.Tensor, variance: torch.Tensor, seen: Sequence[bool]) -> None:
        sizes = [norm.num_features for norm in self._norms]
        means, variances = mean.split(sizes), variance.split(sizes)
        by_momentum: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for index, norm in enumerate(self._norms):
            if not seen[index]:
                continue
            assert norm.running_mean is not None
            assert norm.running_var is not None
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked += 1
            # momentum=None asks nn.BatchNorm for the plain average of all mini-batches
            factor = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            running, new = by_momentum.setdefault(factor, ([], []))
            running += [norm.running_mean, norm.running_var]
            new += [means[index], variances[index]]
        self.newest = []
        for factor, (running, new) in by_momentum.items():
            torch._foreach_lerp_(running, new, factor)
            self.newest += zip(running, new, strict=True)


class DeferredBatchNorm(_BatchNorm):
    """Takes the place of an `nn.BatchNorm*d`: same parameters and buffers (the same objects), same state-dict keys."""

    def __init__(self, original: _BatchNorm, statistics: BatchStatistics) -> None:
        super().__init__(original.num_features, original.eps, original.momentum, affine=False, device="meta")
        self.affine = original.affine
        self.weight, self.bias = original.weight, original.bias
        self.running_mean, self.running_var = original.running_mean, original.running_var
        self.num_batches_tracked = original.num_batches_tracked
        self.training = original.training
        keep_mark(self, original)
        # timm's `BatchNormAct2d` is a batch norm that also drops and activates: without these, another model
        self.drop, self.act = getattr(original, "drop", None), getattr(original, "act", None)
        self._statistics = statistics
        self._index = statistics.register(self)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, ...) -> the same shape; in training normalized by the micro-batch's own moments."""
        self._check_input_dim(input)
        if not self.training:
            return self._followed(
                F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
            )
        slot = self._statistics.slot(self._index, input.numel() // max(1, input.shape[1]))
        mean, variance = (None, None) if slot is None else slot
        # momentum 1 makes the kernel that normalizes also store this micro-batch's mean and unbiased variance, for free
        return self._followed(F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps))

    def _followed(self, normalized: torch.Tensor) -> torch.Tensor:
        """What the original does after it has normalized."""
        for follower in (self.drop, self.act):
            normalized = normalized if follower is None else follower(normalized)
        return normalized


def defer_batch_norms(module: nn.Module, statistics: BatchStatistics) -> nn.Module:
    """Replace every batch norm below `module` that tracks statistics; returns `module`, or its replacement."""
    if isinstance(module, _BatchNorm) and not isinstance(module, DeferredBatchNorm):
        if module.track_running_stats and module.running_mean is not None:
            return DeferredBatchNorm(module, statistics)
        return module
    for name, child in module.named_children():
        replacement = defer_batch_norms(child, statistics)
        if replacement is not child:
            setattr(module, name, replacement)
    return module
