"""Data parallelism: several pipelines each take a shard of a mini-batch; the replicas of a stage sum their gradients.

They do so once per step, in buckets, while gradients of other layers and stages are still computed. In a step, a bucket
goes through four states:

    filling    gradients may still change: `grads_missing` of them
    sent       copied into `buffer`; an all-to-all fills `received`, all replicas' copies of the part this replica sums
    summed     in the order of the replicas; an all-gather overwrites `buffer` with the sums of all parts
    gathered   the sums in `buffer` are the gradients of the parameters

So replicas do equal work, gradients are copied once, and the order of every sum depends neither on the cut nor on the
run (law 7).
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
    part: int  # number of elements that each replica sums
    grads_missing: int = 0  # gradients that may still change in this step
    buffer: torch.Tensor | None = None  # (R, part): gradients in memory order, later their sums; padding is not read
    views: Sequence[torch.Tensor] = ()  # the gradients in `buffer`
    received: torch.Tensor | None = None  # (R, part): from each replica, the part that this replica sums
    work: Any = None


@dataclass
class Replicas:
    """Sums an engine's gradients over the `size` processes that have the same stages, one per pipeline, in the order of
    the pipelines; `groups` has their process group for each device of the stages. The context `waits` is active during
    waits; methods raise PeerLostError if another replica is lost."""

    groups: Mapping[torch.device, dist.ProcessGroup]
    size: int
    waits: Callable[[], AbstractContextManager[object]] = nullcontext
    _buckets: list[_Bucket] = field(default_factory=list)  # in the order in which all replicas sum them
    _launched: int = 0  # number of these buckets that are sent
    _with_gradient: set[nn.Parameter] = field(default_factory=set)  # in this step, in this replica
    # parameters that got a gradient in the first step, in any replica
    _used_parameters: set[nn.Parameter] | None = None

    def connect(self, seconds: float) -> None:
        """Send one message of each kind over each group, in the same order in all processes. NCCL connects at the first
        message, and needs idle devices for that: later, receives that wait for other stages keep devices busy. Raises
        PeerLostError if connecting takes longer than `seconds`."""
        for device, group in self.groups.items():
            sent, received, gathered = torch.zeros(3, self.size, device=device)
            with self._waiting():
                works: list[Any] = [
                    dist.all_to_all_single(received, sent, group=group, async_op=True),
                    _all_gather(gathered, sent[:1].clone(), group),
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
        step. Buckets are summed in the order in which a backward reaches them."""
        if not self._buckets:
            self._buckets = [
                bucket for stage in sorted(stages, reverse=True) for bucket in _buckets(stage, stages[stage], self.size)
            ]
        for bucket in self._buckets:
            bucket.grads_missing = len(bucket.parameters)
        self._launched = 0
        self._with_gradient.clear()

    @contextmanager
    def overlapping_last_action(self, stage: int) -> Iterator[None]:
        """While active, an accumulated gradient of `stage` is final; afterwards all are, and a parameter without a
        gradient gets none in this step. No earlier action makes a gradient final: a weight may wait for its W in some
        micro-batches only. Raises InputError for a gradient that was added to after it had been sent."""

        def note_final(bucket: _Bucket, parameter: torch.Tensor) -> None:
            bucket.grads_missing -= 1
            self._launch_ready_sums()

        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(note_final, bucket))
            for bucket in self._buckets
            for parameter in (bucket.parameters if bucket.stage == stage else ())
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._buckets:
            if bucket.stage == stage:
                if bucket.buffer is not None and any(parameter.grad is not None for parameter in bucket.parameters):
                    raise InputError(
                        f"replicas={self.size}: a layer of stage {stage} adds to a gradient several times in one "
                        "backward, by a nested backward; use replicas=1, or let autograd run it"
                    )
                bucket.grads_missing = 0
        self._launch_ready_sums()

    def finish(self) -> None:
        """Wait until all gradients are summed over replicas; `.grad` then has the sums, and is None for parameters that
        got no gradient in this replica. A replica without samples gets sums for all parameters that got a gradient in
        the first step, in any replica."""
        gathered: list[Any] = []
        for bucket in self._buckets:
            with self._waiting():
                bucket.work.wait()
                assert bucket.received is not None
                assert bucket.buffer is not None
                sums = bucket.received[0]
                for part in bucket.received[1:]:
                    sums += part
                group = self.groups[sums.device]
                gathered.append(_all_gather(bucket.buffer.view(-1), sums, group))
        if self._used_parameters is None:
            self._used_parameters = self._exchange_used()
        summed = self._with_gradient or self._used_parameters
        for bucket, work in zip(self._buckets, gathered, strict=True):
            with self._waiting():
                work.wait()
            for parameter, sums in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = sums if parameter in summed else None
            bucket.buffer = bucket.received = bucket.work = None
            bucket.views = ()

    def _exchange_used(self) -> set[nn.Parameter]:
        """The parameters that have got a gradient in any replica in this step. The host waits for this exchange."""
        used = set[nn.Parameter]()
        for device in self.groups:
            parameters = [p for bucket in self._buckets for p in bucket.parameters if p.device == device]
            flags = torch.tensor([float(parameter in self._with_gradient) for parameter in parameters], device=device)
            counts = torch.stack(tuple(self.gather(flags))).sum(dim=0).tolist()
            used |= {parameter for parameter, count in zip(parameters, counts, strict=True) if count}
        return used

    def _launch_ready_sums(self) -> None:
        """Send buckets whose gradients are final, in order: other replicas may reach them in another order."""
        while self._launched < len(self._buckets) and not self._buckets[self._launched].grads_missing:
            bucket = self._buckets[self._launched]
            self._launched += 1
            first = bucket.parameters[0]
            indices = [index for index, parameter in enumerate(bucket.parameters) if parameter.grad is not None]
            allocate = torch.empty if len(indices) == len(bucket.parameters) else torch.zeros
            bucket.buffer = allocate(self.size, bucket.part, dtype=first.dtype, device=first.device)
            bucket.views = [bucket.buffer.view(-1).as_strided(*place) for place in bucket.places]
            if indices:
                gradients = [gradient for parameter in bucket.parameters if (gradient := parameter.grad) is not None]
                with torch.no_grad():
                    torch._foreach_copy_([bucket.views[index] for index in indices], gradients)
                del gradients
            for index in indices:
                self._with_gradient.add(bucket.parameters[index])
                bucket.parameters[index].grad = None  # frees its memory for the rest of the step
            bucket.received = torch.empty_like(bucket.buffer)
            with self._waiting():
                group = self.groups[first.device]
                bucket.work = dist.all_to_all_single(bucket.received, bucket.buffer, group=group, async_op=True)

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting_for_peers(self.waits(), "the gradients of another replica did not arrive")


def _buckets(stage: int, module: nn.Module, replicas: int) -> Iterator[_Bucket]:
    """The buckets of a stage: its trained parameters from last to first, as a backward reaches them."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for (dtype, _), alike in groupby(reversed(trained), key=lambda parameter: (parameter.dtype, parameter.device)):
        for parameters in _fill_buckets(alike):
            aligned = ALIGNED_BYTES // dtype.itemsize
            sizes = [-(-parameter.numel() // aligned) * aligned for parameter in parameters]
            *offsets, length = accumulate(sizes, initial=0)
            places = [
                (parameter.shape, torch.empty_like(parameter, device="meta").stride(), offset)
                for parameter, offset in zip(parameters, offsets, strict=True)
            ]
            yield _Bucket(stage, parameters, places, part=-(-length // (replicas * aligned)) * aligned)


def _fill_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(added.nbytes for added in bucket) >= _BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
