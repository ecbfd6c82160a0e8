"""Batch norm under micro-batches: normalize per micro-batch, track per mini-batch (paper sections 2.2 and 6).

Every micro-batch writes its mean and variance separately; `commit` merges them once per mini-batch. A recomputation
writes nothing, so nothing is counted twice, and uneven or short mini-batches need no counting of calls. The merged
variance is unbiased, of the whole mini-batch, as in `nn.BatchNorm`: the running statistics are the same as for a single
big batch.

Departs from the paper: Lingvo (`core/bn_layers.py`) and torchgpipe keep the biased variance.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_cli.errors import InputError
from gpipe_cli.system.accelerator import to_device

AllGather: TypeAlias = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Gathers a tensor of this process from all replicas of its stages, in the replicas' order."""


_ALIGNED_BYTES = 128  # cuDNN's persistent batch norm stores statistics 16 bytes at a time, without checking alignment


def single_replica(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The `AllGather` of a single replica."""
    return (tensor,)


class AppliedTwiceError(InputError):
    """A forward applies the batch norm `layer` twice."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"layer {layer}: a batch norm is applied twice in a forward, and tracks the statistics of a single input; "
            "make a norm for each application"
        )


class BatchMoments(NamedTuple):
    """The moments of a micro-batch in all norms: a flat tensor (2, sum of widths), its views for each norm, and the
    number of values per channel of each norm that has written to it."""

    flat: torch.Tensor
    views: list[tuple[torch.Tensor, torch.Tensor]]  # mean and variance, (C,) each
    counts: dict[int, int]


class BatchStatistics:
    """The moments of a stage's batch norms, by micro-batch. All norms share a micro-batch's flat tensor, so that a
    commit costs a dozen operations per stage, not per norm.

    A norm's width in that tensor is its C channels plus padding, so that the next norm begins at an aligned address.
    The padding holds zeros, and is computed like any channel.
    """

    def __init__(self) -> None:
        self.norms: list[Any] = []  # batch norms that track statistics; Any, as torch types these as optional
        self.paths: list[str] = []  # of the norms in the module
        self._by_micro_batch: dict[int, BatchMoments] = {}  # reused in every step
        self._written_moments: BatchMoments | None = None
        # running statistics changed by the newest mini-batch, each with that mini-batch's own value
        self.last_batch_stats: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def flat_tensors(self) -> list[torch.Tensor]:
        """Those of all micro-batches so far."""
        return [moments.flat for moments in self._by_micro_batch.values()]

    def register(self, norm: _BatchNorm, path: str) -> int:
        self.norms.append(norm)
        self.paths.append(path)
        return len(self.norms) - 1

    def begin_step(self) -> None:
        """Discard the moments that a step that failed has left."""
        for moments in self._by_micro_batch.values():
            moments.counts.clear()

    def moments_of(self, micro_batch: int) -> BatchMoments:
        if micro_batch not in self._by_micro_batch:
            self._by_micro_batch[micro_batch] = self.new_moments()
        return self._by_micro_batch[micro_batch]

    def new_moments(self) -> BatchMoments:
        """Moments that norms write to in a micro-batch's forward."""
        like = self.norms[0].running_mean if self.norms else torch.empty(0)
        flat = like.new_zeros(2, sum(self._widths))
        return BatchMoments(flat, list(zip(*map(self._split_by_norm, flat), strict=True)), {})

    @contextmanager
    def writing_to(self, moments: BatchMoments | None) -> Iterator[None]:
        """While active, in a micro-batch's forward, norms in training mode overwrite these moments; None: write
        nothing. Raises AppliedTwiceError."""
        if moments is not None:
            moments.counts.clear()
        self._written_moments = moments
        try:
            yield
        finally:
            self._written_moments = None

    def target_of(self, norm: int, values_per_channel: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where norm number `norm` writes mean and variance, (C,) each; None if it must write nothing. Raises
        AppliedTwiceError."""
        if self._written_moments is None:
            return None, None
        if norm in self._written_moments.counts:
            raise AppliedTwiceError(self.paths[norm])
        self._written_moments.counts[norm] = values_per_channel
        return self._written_moments.views[norm]

    @torch.no_grad()
    def copy(self, written: BatchMoments, micro_batch: int) -> None:
        """Copy what a graph has written into the moments of a micro-batch."""
        if written.counts:
            moments = self.moments_of(micro_batch)
            moments.flat.copy_(written.flat)
            moments.counts.update(written.counts)

    @torch.no_grad()
    def commit(self, all_gather: AllGather = single_replica) -> None:
        """Merge this mini-batch's moments, on all replicas, exactly into the running statistics; then discard them."""
        used = [moments for _, moments in sorted(self._by_micro_batch.items()) if moments.counts]
        self.last_batch_stats = self._merge(used, all_gather)

    def _merge(self, used: Sequence[BatchMoments], all_gather: AllGather) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Merge the `used` moments; returns the running statistics changed, each with the merged value.

        Chan, Golub and LeVeque's pairwise formula in closed form and float64: the mean of squares minus the square of
        the mean would lose digits. Each product and each sum is a separate operation, so that a channel gets the same
        bits anywhere in the flat tensor, hence for any cut.
        """
        if not self.norms or (not used and all_gather is single_replica):
            return []
        dtype = self.norms[0].running_mean.dtype
        norms_used = [any(norm in moments.counts for moments in used) for norm in range(len(self.norms))]
        parts = all_gather(self._moments(used))
        if not used:  # this replica has no sample of the mini-batch
            norms_used = [bool(total[0]) for total in self._split_by_norm(torch.stack(tuple(parts)).sum(dim=0)[0])]
        if not any(norms_used):  # all norms are frozen
            return []
        total, mean, squares = parts[0]
        if len(parts) > 1:
            total = sum(part[0] for part in parts)  # whole numbers: exact in any order
            mean = sum(part[1] * part[0] for part in parts) / total
            squares = sum(part[2] + (part[1] - mean).square() * part[0] for part in parts)
        variance = squares / (total - 1)
        for moments in used:
            moments.counts.clear()
        return self._update(mean.to(dtype), variance.to(dtype), norms_used)

    def _moments(self, used: Sequence[BatchMoments]) -> torch.Tensor:
        """Statistics over the micro-batches of these moments, float64 (3, widths): the number of values, their mean,
        and the sum of their squared differences from it."""
        if not used:
            return self.norms[0].running_mean.new_zeros(3, sum(self._widths), dtype=torch.float64)
        rows = tuple(tuple(moments.counts.get(norm, 0) for norm in range(len(self.norms))) for moments in used)
        values, total = _values_of_channels(rows, self._widths, used[0].flat.device)
        # products of all micro-batches together, as each product takes a launch; sums in the micro-batches' order
        means, variances = torch.stack([moments.flat for moments in used], dim=1).double()
        mean = torch.zeros_like(total)
        for weighted in means * values:
            mean += weighted
        mean /= total
        within, differences = variances * (values - 1).clamp_(min=0), means - mean
        squares = torch.zeros_like(total)
        for inside, between in zip(within, differences * differences * values, strict=True):
            squares += inside
            squares += between
        return torch.stack((total, mean, squares))

    @property
    def _widths(self) -> tuple[int, ...]:
        """The elements of each norm in a flat tensor: its channels, up to the next aligned address."""
        units = [_ALIGNED_BYTES // norm.running_mean.itemsize for norm in self.norms]
        return tuple(-(-norm.num_features // unit) * unit for norm, unit in zip(self.norms, units, strict=True))

    def _split_by_norm(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each norm's channels, (C,), in a flat tensor (sum of widths,)."""
        parts = zip(flat.split(self._widths), self.norms, strict=True)
        return [part[: norm.num_features] for part, norm in parts]

    def _update(
        self, mean: torch.Tensor, variance: torch.Tensor, norms_used: Sequence[bool]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Move the running statistics of the norms `norms_used` towards `mean` and `variance`; returns what `_merge`
        does."""
        changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        by_momentum: dict[float | None, tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = {}
        counts = [norm.num_batches_tracked for norm, was_used in zip(self.norms, norms_used, strict=True) if was_used]
        torch._foreach_add_(counts, 1)
        for norm, was_used, *moments in zip(
            self.norms, norms_used, self._split_by_norm(mean), self._split_by_norm(variance), strict=True
        ):
            if not was_used:
                continue
            running, merged, shares = by_momentum.setdefault(norm.momentum, ([], [], []))
            running += norm.running_mean, norm.running_var
            merged += moments
            if norm.momentum is None:  # as in nn.BatchNorm: the plain average over all mini-batches
                # computed on the device: reading the count would wait for a GPU
                shares += [norm.num_batches_tracked.double().reciprocal().to(mean.dtype)] * 2
        for momentum, (running, merged, shares) in by_momentum.items():
            torch._foreach_lerp_(running, merged, shares if momentum is None else momentum)
            changed += zip(running, merged, strict=True)
        return changed


@lru_cache(maxsize=256)  # entries for all stages of a process and all sizes of mini-batch
def _values_of_channels(
    rows: tuple[tuple[int, ...], ...], widths: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of values of every channel by micro-batch, (M, sum of widths), and in all; `rows` has them by norm."""
    by_norm = torch.tensor(rows, dtype=torch.float64)
    by_channel = by_norm.repeat_interleave(torch.tensor(widths), dim=1, output_size=sum(widths))
    values = to_device(by_channel, device)
    return values, values.sum(dim=0)  # whole numbers: exact in any order


def defer_batch_norms(module: nn.Module, statistics: BatchStatistics) -> list[_BatchNorm]:
    """Make every batch norm below `module` that tracks statistics write them to `statistics`; returns these norms. They
    stay the same objects, with their parameters, hooks and whatever else their classes do. Raises InputError for norms
    whose statistics cannot be deferred."""
    norms = find_tracking_norms(module)
    for norm, path in norms.items():
        vars(norm)["forward"] = _make_deferred_forward(norm, path, statistics)
    return list(norms)


def find_tracking_norms(module: nn.Module) -> dict[_BatchNorm, str]:
    """The batch norms below `module` that track statistics, with their paths. Raises InputError for a norm with an
    unknown forward, whose statistics cannot be redirected, and for two norms that share statistics."""
    norms: dict[_BatchNorm, str] = {}
    owners: dict[int, str] = {}
    for path, norm in module.named_modules():
        if not isinstance(norm, _BatchNorm) or not norm.track_running_stats or norm.running_mean is None:
            continue
        if (owner := owners.setdefault(id(norm.running_mean), path)) != path:
            raise InputError(f"layers {owner} and {path}: two batch norms track one running_mean; give each its own")
        if not _is_known(norm):
            raise InputError(
                f"layer {path} ({type(norm).__name__}): a batch norm that overrides forward would track statistics "
                "of micro-batches instead of the mini-batch; use nn.BatchNorm1d, 2d or 3d and do the rest in a module "
                "around it, or use track_running_stats=False"
            )
        norms[norm] = path
    return norms


@contextmanager
def batch_norm_deferred(module: nn.Module) -> Iterator[None]:
    """While active, batch norms below `module` normalize as in a pipeline and track nothing. Raises InputError for
    norms whose statistics cannot be deferred."""
    norms = defer_batch_norms(module, BatchStatistics())
    try:
        yield
    finally:
        for norm in norms:
            del vars(norm)["forward"]


# Known forwards, by name, so that timm need not be imported. A subclass that inherits such a forward is also known.
_KNOWN_FORWARDS = (
    ("torch.nn.modules.batchnorm", "_BatchNorm.forward"),
    ("timm.layers.norm_act", "BatchNormAct2d.forward"),
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _is_known(norm: _BatchNorm) -> bool:
    forward = type(norm).forward
    is_altered = "forward" in vars(norm) or any(norm._buffers.get(name) is None for name in _STATISTICS)
    return not is_altered and (forward.__module__, forward.__qualname__) in _KNOWN_FORWARDS


def swap_stats(norm: _BatchNorm, mean: torch.Tensor | None, variance: torch.Tensor | None) -> tuple[Any, ...]:
    """Make a norm in training mode write the mean and unbiased variance of its input to these tensors, (C,) each,
    or nowhere if they are None. Returns what `restore_stats` takes."""
    buffers = norm._buffers
    before = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"], norm.momentum
    # with a momentum of 1 the kernel that normalizes also stores the moments of this micro-batch, for free
    restore_stats(norm, (mean, variance, None, 1.0))
    return before


def restore_stats(norm: _BatchNorm, before: tuple[Any, ...]) -> None:
    """Have the norm track its own statistics again."""
    buffers = norm._buffers
    buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"], vars(norm)["momentum"] = before


def _make_deferred_forward(
    norm: _BatchNorm, path: str, statistics: BatchStatistics
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm's own forward, which in training writes the micro-batch's moments."""
    forward = type(norm).forward
    index = statistics.register(norm, path)
    attributes, channels = vars(norm), norm.num_features

    def run(input: torch.Tensor) -> torch.Tensor:
        if not attributes["training"]:
            return forward(norm, input)
        before = swap_stats(norm, *statistics.target_of(index, input.numel() // channels))
        try:
            return forward(norm, input)
        finally:
            restore_stats(norm, before)

    return run
