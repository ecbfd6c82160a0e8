"""Runs a schedule: what F, R, B, I and W mean (paper section 2.2, Figure 2(c)).

A process performs, in order, the actions of its stages: a single stage, some or all of the pipeline; only the transport
differs. There is no other path: training with one partition and evaluation are also schedules.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from torch import nn

from gpipe_cli.pipeline.runtime.boundary import OptionalTensors, Tensors, split_all
from gpipe_cli.pipeline.runtime.deferred_batch_norm import AppliedTwiceError, single_replica
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError, shapes_of
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.stage import Objective, Stage
from gpipe_cli.pipeline.runtime.step_timings import StepTimer, StepTimings
from gpipe_cli.pipeline.runtime.transport import PeerLostError, Transport
from gpipe_cli.schedule.dependencies import order_with_saved_state
from gpipe_cli.schedule.schedule import SENDS_GRADIENT, Action, Kind, Retain, Schedule
from gpipe_cli.system.accelerator import using_device

OnAction: TypeAlias = Callable[[Action, int, Sequence[int]], None]
"""Called before each action, with the action, the samples of its micro-batch and the lengths of the sentences."""


def ignore_action(action: Action, samples: int, lengths: Sequence[int]) -> None:
    """The `OnAction` that does nothing."""


class ActionFailedError(RuntimeError):
    """An action raised an exception, the chained cause. Names the action, the layer and the shapes it was given."""

    def __init__(self, action: Action, layer: str, shapes: str, cause: BaseException) -> None:
        place = f"stage {action.stage}" + (f", layer {layer}" if layer else "")
        super().__init__(f"{action} failed ({place}; {shapes}): {type(cause).__name__}: {cause}")
        self.action, self.layer = action, layer


class _ScheduledAction(NamedTuple):
    """An action of a schedule, and what follows from the schedule."""

    action: Action
    retain: Retain  # what the stage keeps of the micro-batch
    receives: bool  # from another stage
    sends: bool  # to another stage
    is_last: bool  # of its stage


class Executor:
    """Performs schedules on the `stages` (by index) of this process. `device_of_stage[k]` is the index of stage k's
    device, for the whole pipeline; `on_action` lets a supervisor report what the process was doing if it is killed."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        device_of_stage: Sequence[int],
        transport: Transport,
        on_action: OnAction = ignore_action,
    ) -> None:
        self._stages, self._transport, self._on_action = stages, transport, on_action
        self._device_of_stage, self._last = tuple(device_of_stage), len(device_of_stage) - 1
        self._hooked_parameters: list[nn.Parameter] = []  # with hooks for their gradients, in the newest step
        self._parameters = [*dict.fromkeys(p for stage in stages.values() for p in stage.module.parameters())]
        self.timer = StepTimer({index: stage.device for index, stage in stages.items()})

    def run(
        self,
        schedule: Schedule,
        step: int,
        sizes: Sequence[int],
        inputs: Tensors | None,
        objective: Objective | None,
        lengths: Sequence[int] = (),
        *,
        first_micro_batch: int = 0,
        replicas: Replicas | None = None,
    ) -> StepTimings:
        """Run a mini-batch: all actions of the schedule on the stages of this process.

        `sizes` are the samples of each micro-batch, `lengths` what sentences are padded to in this mini-batch; the
        process of the first stage needs `inputs`, (N, ...) each, the last stage's process `objective`. With `replicas`,
        this pipeline's micro-batches are numbered from `first_micro_batch` on, and gradients are still being summed
        over replicas on return. Hooks of `register_post_accumulate_grad_hook`, which may change weights that other
        micro-batches still need, are left to `call_gradient_hooks`. Raises ActionFailedError if an action fails,
        ChangedInputError for a layer that changes its input in place, AppliedTwiceError for a batch norm, and
        PeerLostError if a neighbour is lost.
        """
        micro_batches = () if inputs is None else split_all(inputs, sizes)
        self._transport.begin_step(schedule, sizes, lengths)
        for index, stage in self._stages.items():
            stage_objective = objective if index == self._last else None
            stage.begin_step(step, stage_objective, first_micro_batch, schedule.stages[index] if sizes else ())
        timings = self.timer.begin_step(schedule)
        if replicas is not None:
            replicas.begin_step({index: stage.module for index, stage in self._stages.items()})
        self._hooked_parameters = [parameter for parameter in self._parameters if parameter._post_accumulate_grad_hooks]
        with self._without_gradient_hooks() if self._hooked_parameters else nullcontext():
            for scheduled in _actions_in_order(schedule, self._device_of_stage, frozenset(self._stages)):
                action = scheduled.action
                self._on_action(action, sizes[action.micro_batch], lengths)
                with (
                    replicas.overlapping_last_action(action.stage) if replicas and scheduled.is_last else nullcontext()
                ):
                    self._perform(scheduled, micro_batches, timings)
        if replicas is not None and not sizes:
            for index in self._stages:
                with replicas.overlapping_last_action(index):
                    pass  # a pipeline without samples computes no gradients
        for stage in self._stages.values():
            stage.finish_step(single_replica if replicas is None else replicas.gather)
        self._transport.finish_step()
        return timings

    def call_gradient_hooks(self) -> None:
        """Call the hooks of `register_post_accumulate_grad_hook`, once the gradients of a mini-batch are complete."""
        for parameter in self._hooked_parameters:
            if parameter.grad is not None:
                for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)

    @contextmanager
    def _without_gradient_hooks(self) -> Iterator[None]:
        hooks = [parameter._post_accumulate_grad_hooks for parameter in self._hooked_parameters]
        for parameter in self._hooked_parameters:
            parameter._post_accumulate_grad_hooks = OrderedDict()  # None would leave them in autograd
        try:
            yield
        finally:
            for parameter, of_parameter in zip(self._hooked_parameters, hooks, strict=True):
                parameter._post_accumulate_grad_hooks = of_parameter

    def drain_sends(self) -> None:
        """Wait until the last step's tensors have left this process; call this before discarding the executor."""
        self._transport.drain_sends()

    def _perform(self, scheduled: _ScheduledAction, micro_batches: Sequence[Tensors], timings: StepTimings) -> None:
        """Perform an action on stage k, in four steps; `timings` get the time between them.

             1. receive             2. compute                           3. send        4. post

        F    outputs of k-1  ---->  run the layers, keep input or graph  ----> outputs   receives of
        R                           run them again, keep the graph                       actions that
        B    gradients of k+1 --->  run the graph backward, drop it      ----> gradients come later
        I    gradients of k+1 --->  as B, but weights' gradients wait    ----> gradients
        W                           compute the weights' gradients
        """
        action = scheduled.action
        stage, clock = self._stages[action.stage], self.timer.clocks[action.stage]
        given: OptionalTensors = ()
        try:
            begun = clock.now()

            # 1. Receive. Stage 0 takes the samples themselves; the last stage's backward starts from its own loss.
            if scheduled.receives:
                given = self._transport.receive(action)
            elif action.kind is Kind.F:
                given = micro_batches[action.micro_batch]
            received, cpu_before = clock.now(), clock.cpu_seconds()

            # 2. Compute. This is the span that a timeline shows.
            with using_device(stage.device):  # kernels that layers launch themselves go to the current device
                result = self._compute(stage, action, given, scheduled.retain)
            cpu_after, computed = clock.cpu_seconds(), clock.now()

            # 3. Send on to stage k+1, or back to stage k-1.
            if scheduled.sends:
                self._transport.send(action, result)

            # 4. Post the receives that waited for this action to be launched, or for a buffer that it has used.
            self._transport.after_action()
            timings.mark_action(action.stage, begun, received, computed, clock.now(), cpu_after - cpu_before)
        except (PeerLostError, ChangedInputError, AppliedTwiceError):
            raise
        except Exception as error:
            kind = "gradient" if action.kind in SENDS_GRADIENT else "input"
            shapes = stage.layer_shapes if stage.layer_name else shapes_of(given)
            what = f"{kind} {shapes}" if shapes else f"micro-batch {action.micro_batch}"
            raise ActionFailedError(action, stage.layer_name, what, error) from error

    @staticmethod
    def _compute(stage: Stage, action: Action, given: OptionalTensors, retain: Retain) -> OptionalTensors:
        if action.kind is Kind.F:
            return stage.forward(action.micro_batch, tuple(t for t in given if t is not None), retain)
        if not stage.needs_backward:
            return (None,) * len(stage.inputs)
        match action.kind:
            case Kind.R:
                stage.recompute(action.micro_batch)
                return ()
            case Kind.B | Kind.I:
                return stage.backward(action.micro_batch, given, split=action.kind is Kind.I)
            case Kind.W:
                stage.backward_weights(action.micro_batch)
                return ()


@lru_cache(maxsize=16)  # mini-batches of text may differ in M, and each M has another schedule
def _actions_in_order(
    schedule: Schedule, device_of_stage: tuple[int, ...], stages: frozenset[int]
) -> Sequence[_ScheduledAction]:
    """The actions of `stages` in the order in which their process performs them."""
    in_order = []
    for action, retain in order_with_saved_state(schedule, device_of_stage):
        if action.stage in stages:
            sends_outputs = action.kind is Kind.F and action.stage < len(device_of_stage) - 1
            sends_gradients = action.kind in SENDS_GRADIENT and action.stage > 0
            is_last = action == schedule.stages[action.stage][-1]
            in_order.append(
                _ScheduledAction(
                    action, retain, schedule.source(action) is not None, sends_outputs or sends_gradients, is_last
                )
            )
    return in_order
