"""Data parallelism: several pipelines each take a share of a mini-batch; the replicas of a stage sum their gradients.

They do so once per step, after the stage's last backward, while earlier stages still compute. Gradients are sent in
buckets, in two steps: an all-to-all gives each replica all copies of its own part, which it sums in the order of the
replicas; an all-gather then sends the sums to all. So all replicas do equal work, and the order of every sum depends
neither on the cut nor on the run (law 7).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.runtime.transport import waiting_for_peers

_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class _Bucket:
    """Gradients that are being summed over R replicas."""

    gradients: Sequence[torch.Tensor]
    own: torch.Tensor  # (R, n): these gradients flattened, with zeros up to a multiple of R
    received: torch.Tensor  # (R, n): from each replica, the part that this one sums
    work: dist.Work


class Replicas:
    """The `size` processes of `group`, which have the same stages, one in each pipeline and in that order. Every wait
    is inside the context `waits`; methods raise PeerLostError if another replica is lost."""

    def __init__(
        self, group: dist.ProcessGroup, size: int, waits: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._group, self._size, self._waits = group, size, waits
        self._buckets: list[_Bucket] = []

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """This tensor from every replica, in the order of the replicas."""
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        with self._waiting():
            dist.all_gather(parts, tensor, group=self._group)
        return parts

    def begin(self, parameters: Iterable[torch.nn.Parameter], *, empty: bool) -> None:
        """Start summing the gradients of a stage, which must be final. All replicas call this for the same stages in
        the same order. `empty`: this replica had no samples."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained if empty else ():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        for _, of_type in groupby(gradients, key=attrgetter("dtype")):
            for bucket in _buckets(of_type):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                own = torch.nn.functional.pad(flat, (0, -flat.numel() % self._size)).view(self._size, -1)
                received = torch.empty_like(own)
                with self._waiting():
                    work: Any = dist.all_to_all_single(received, own, group=self._group, async_op=True)
                self._buckets.append(_Bucket(bucket, own, received, work))

    def finish(self) -> None:
        """Wait until all gradients given to `begin` are summed over replicas; `.grad` then has the sums."""
        gathered: list[Any] = []
        for bucket in self._buckets:
            with self._waiting():
                bucket.work.wait()
                sums = bucket.received[0]
                for part in bucket.received[1:]:
                    sums += part
                gathered.append(
                    dist.all_gather_into_tensor(bucket.own.view(-1), sums, group=self._group, async_op=True)
                )
        for bucket, work in zip(self._buckets, gathered, strict=True):
            with self._waiting():
                work.wait()
            sizes = [gradient.numel() for gradient in bucket.gradients]
            parts = bucket.own.flatten()[: sum(sizes)].split(sizes)
            torch._foreach_copy_(list(bucket.gradients), [
                part.view(gradient.shape) for part, gradient in zip(parts, bucket.gradients, strict=True)
            ])  # fmt: skip
        self._buckets.clear()

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting_for_peers(self._waits(), "the gradients of another replica did not come")


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    filled = 0
    for gradient in gradients:
        bucket.append(gradient)
        filled += gradient.numel() * gradient.element_size()
        if filled >= _BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket
