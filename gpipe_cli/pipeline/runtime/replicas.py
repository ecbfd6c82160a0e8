"""Data parallelism: several pipelines each take a share of a mini-batch; the replicas of a stage sum their gradients.

They do so once per step, in buckets, while gradients of other layers and stages are still computed. A bucket is summed
in two steps: an all-to-all gives each replica all copies of its own part, which it sums in the order of the replicas;
an all-gather then sends the sums to all. So all replicas do equal work, and the order of every sum depends neither on
the cut nor on the run (law 7).

Gradients are copied once, into the bucket that is sent. The sums arrive in its memory, and become the gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.boundary import ALIGNED_BYTES
from gpipe_cli.pipeline.runtime.link import await_first
from gpipe_cli.pipeline.runtime.transport import waiting_for_peers

_BUCKET_BYTES = 25 << 20


def _all_gather(gathered: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to gather `part` (n,) of every process into `gathered` (R n,)."""
    # torch warns of its older name, and before 2.14 has no other
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(gathered, part, group=group, async_op=True)


@dataclass(eq=False)
class _Bucket:
    """Parameters of a stage, of one type and on one device, whose gradients are summed together."""

    stage: int
    parameters: Sequence[nn.Parameter]
    places: Sequence[tuple[Any, Any, int]]  # shape, strides as autograd gives them, and offset of each gradient
    part: int  # elements that each replica sums
    pending: int = 0  # gradients that may still change in this step
    own: torch.Tensor | None = None  # (R, part): the gradients in memory order; what lies between them is not read
    views: Sequence[torch.Tensor] = ()  # the gradients in `own`
    received: torch.Tensor | None = None  # (R, part): from each replica, the part that this one sums
    work: Any = None


@dataclass
class Replicas:
    """Sums one engine's gradients over the `size` processes that have the same stages, one in each pipeline and in that
    order; `groups` has a process group of them for each device of their stages. Every wait is inside the context
    `waits`; methods raise PeerLostError if another replica is lost."""

    groups: Mapping[torch.device, dist.ProcessGroup]
    size: int
    waits: Callable[[], AbstractContextManager[object]] = nullcontext
    _buckets: list[_Bucket] = field(default_factory=list)  # in the order in which all replicas sum them
    _begun: int = 0  # how many of them are being summed
    _found: set[nn.Parameter] = field(default_factory=set)  # parameters that have got a gradient here in this step
    _used: set[nn.Parameter] | None = None  # those that got one in the first step, in any replica

    def connect(self, seconds: float) -> None:
        """Send one message of each kind over each group, in the same order in all processes. NCCL connects at the first
        one, and needs idle devices for it, which are not when receives wait for other stages. Raises PeerLostError if
        that takes longer than `seconds`."""
        for device, group in self.groups.items():
            own, received, gathered = torch.zeros(3, self.size, device=device)
            with self._waiting():
                works: list[Any] = [
                    dist.all_to_all_single(received, own, group=group, async_op=True),
                    _all_gather(gathered, own[:1].clone(), group),
                ]
                for work in works:
                    work.wait()
                await_first(works, device, seconds)

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """This tensor from every replica, in the order of the replicas."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._waiting():
            dist.all_gather(parts, tensor, group=self.groups[tensor.device])
        return parts

    def begin_step(self, stages: Mapping[int, nn.Module]) -> None:
        """Called before the first action; `stages`: the layers of this process's stages, by index, the same in every
        step. Buckets are summed in the order in which a backward gets to them."""
        if not self._buckets:
            self._buckets = [
                bucket for stage in sorted(stages, reverse=True) for bucket in _buckets(stage, stages[stage], self.size)
            ]
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)
        self._begun = 0
        self._found.clear()

    @contextmanager
    def last_action(self, stage: int) -> Iterator[None]:
        """Inside, a gradient of `stage` that has been accumulated is final; afterwards all are, and a parameter without
        one does not get one. No earlier action makes any final: a weight may wait for its W in one micro-batch, and not
        in another. Raises InputError for a gradient that was added to after it had been sent."""

        def is_final(bucket: _Bucket, parameter: torch.Tensor) -> None:
            bucket.pending -= 1
            self._begin()

        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(is_final, bucket))
            for bucket in self._buckets
            for parameter in (bucket.parameters if bucket.stage == stage else ())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._buckets:
            if bucket.stage == stage:
                if bucket.own is not None and any(one.grad is not None for one in bucket.parameters):
                    raise InputError(
                        f"replicas={self.size}: a layer of stage {stage} adds to a gradient several times in one "
                        "backward, by a backward of its own; use replicas=1, or let autograd run it"
                    )
                bucket.pending = 0
        self._begin()

    def finish(self) -> None:
        """Wait until all gradients are summed over replicas; `.grad` then has the sums, and None where this replica has
        found none. One without samples gets those that any replica has found in the first step."""
        gathered: list[Any] = []
        for bucket in self._buckets:
            with self._waiting():
                bucket.work.wait()
                assert bucket.received is not None
                assert bucket.own is not None
                sums = bucket.received[0]
                for part in bucket.received[1:]:
                    sums += part
                group = self.groups[sums.device]
                gathered.append(_all_gather(bucket.own.view(-1), sums, group))
        if self._used is None:
            self._used = self._found_in_any()
        present = self._found or self._used
        for bucket, work in zip(self._buckets, gathered, strict=True):
            with self._waiting():
                work.wait()
            for parameter, sums in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = sums if parameter in present else None
            bucket.own = bucket.received = bucket.work = None
            bucket.views = ()

    def _found_in_any(self) -> set[nn.Parameter]:
        """The parameters that have got a gradient in any replica. The host waits for that."""
        used = set[nn.Parameter]()
        for device in self.groups:
            parameters = [one for bucket in self._buckets for one in bucket.parameters if one.device == device]
            found = torch.tensor([float(one in self._found) for one in parameters], device=device)
            counts = torch.stack(tuple(self.gather(found))).sum(dim=0).tolist()
            used |= {one for one, count in zip(parameters, counts, strict=True) if count}
        return used

    def _begin(self) -> None:
        """Begin to sum the buckets whose gradients are final, in order: another replica may get to them in another."""
        while self._begun < len(self._buckets) and not self._buckets[self._begun].pending:
            bucket = self._buckets[self._begun]
            self._begun += 1
            first = bucket.parameters[0]
            found = [at for at, parameter in enumerate(bucket.parameters) if parameter.grad is not None]
            made = torch.empty if len(found) == len(bucket.parameters) else torch.zeros
            bucket.own = made(self.size, bucket.part, dtype=first.dtype, device=first.device)
            bucket.views = [bucket.own.view(-1).as_strided(*place) for place in bucket.places]
            if found:
                gradients = [gradient for one in bucket.parameters if (gradient := one.grad) is not None]
                with torch.no_grad():
                    torch._foreach_copy_([bucket.views[at] for at in found], gradients)
                del gradients
            for at in found:
                self._found.add(bucket.parameters[at])
                bucket.parameters[at].grad = None  # its memory is free for what comes next
            bucket.received = torch.empty_like(bucket.own)
            with self._waiting():
                group = self.groups[first.device]
                bucket.work = dist.all_to_all_single(bucket.received, bucket.own, group=group, async_op=True)

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting_for_peers(self.waits(), "the gradients of another replica did not come")


def _buckets(stage: int, module: nn.Module, replicas: int) -> Iterator[_Bucket]:
    """The buckets of a stage: its trained parameters from the last one to the first, as a backward gets to them."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for (dtype, _), alike in groupby(reversed(trained), key=lambda one: (one.dtype, one.device)):
        for parameters in _filled(alike):
            aligned = ALIGNED_BYTES // dtype.itemsize
            sizes = [-(-parameter.numel() // aligned) * aligned for parameter in parameters]
            *offsets, length = accumulate(sizes, initial=0)
            places = [
                (one.shape, torch.empty_like(one, device="meta").stride(), offset)
                for one, offset in zip(parameters, offsets, strict=True)
            ]
            yield _Bucket(stage, parameters, places, part=-(-length // (replicas * aligned)) * aligned)


def _filled(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(one.nbytes for one in bucket) >= _BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
