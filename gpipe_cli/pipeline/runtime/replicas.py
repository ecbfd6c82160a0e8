"""Several pipelines learn from one mini-batch, each from its share: the replicas of a stage add up their gradients.

That happens once a step, after a stage's last backward, while the stages before it still compute. Gradients travel in
buckets, each in two steps: every replica is sent the part of the bucket that is its own and adds up what it got, in the
order of the replicas; then it sends its sums to all. So every replica has the same work, and every sum the same order
whatever the cut and however often it is repeated (law 7).
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
    """Gradients on their way to being added up."""

    gradients: Sequence[torch.Tensor]
    own: torch.Tensor  # (R, n): all of them in a row, and zeros up to a multiple of R
    received: torch.Tensor  # (R, n): of each replica, the part that is added up here
    work: dist.Work


class Replicas:
    """The processes that have the same stages in each of `size` pipelines, in the order of the pipelines; `group` has
    this one among them. Inside of `waits` this process waits for another one."""

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
        """Begin to add up the gradients of a stage, to which nothing is added any more. Called for the same stages in
        the same order by all replicas. `empty`: this one had no samples."""
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
        """Wait until the gradients that `begin` was given are summed over all replicas."""
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
