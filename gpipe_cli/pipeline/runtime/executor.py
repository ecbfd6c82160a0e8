"""Runs a schedule: the one meaning of F, R and B (paper section 2.2, Figure 2(c)).

A process performs, in order, the actions of the stages that live in it, be it one stage, some or all of them; only the
transport differs. There is no other path: training with one partition and evaluation are schedules too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError, shapes_of
from gpipe_cli.pipeline.runtime.micro_batch import Tensors, split_all
from gpipe_cli.pipeline.runtime.recording import Recorder, Recording
from gpipe_cli.pipeline.runtime.stage import Objective, Stage
from gpipe_cli.pipeline.runtime.transport import PeerLostError, Transport
from gpipe_cli.pipeline.schedule.order import linearize
from gpipe_cli.pipeline.schedule.schedules import Action, Kind, Retain, Schedule, keeps

Watch: TypeAlias = Callable[[Action, int, Sequence[int]], None]


class ActionFailedError(RuntimeError):
    """An action raised: which one, in which layer, on what shapes. The cause is chained."""

    def __init__(self, action: Action, layer: str, shapes: str, cause: BaseException) -> None:
        place = f"stage {action.stage}" + (f", layer {layer}" if layer else "")
        super().__init__(f"{action} failed ({place}; {shapes}): {type(cause).__name__}: {cause}")
        self.action, self.layer, self.shapes = action, layer, shapes


class Executor:
    """Performs schedules on the `stages` (by index) that live in this process, out of `partitions` in all.

    `watch` is called with every action, its samples and the lengths of the mini-batch before it is performed: for a
    supervisor that must say what a killed process was doing. The same schedule is analysed once and not per step.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        partitions: int,
        transport: Transport,
        watch: Watch = lambda action, samples, lengths: None,
    ) -> None:
        self._stages, self._transport, self._watch = stages, transport, watch
        self._last = partitions - 1
        self._analysed: dict[int, tuple[Schedule, list[tuple[Action, Retain]]]] = {}
        self.recorder = Recorder({index: stage.device for index, stage in stages.items()})

    def run(
        self,
        schedule: Schedule,
        step: int,
        sizes: Sequence[int],
        inputs: Tensors | None,
        objective: Objective | None,
        lengths: Sequence[int] = (),
    ) -> Recording:
        """One mini-batch: every action of the schedule on the stages of this process. Returns when each of them ran.

        `sizes` are the samples of each micro-batch, `lengths` what sentences are padded to in this mini-batch;
        `inputs` (N, ...) each are needed where the first stage lives, `objective` where the last one does. Raises
        ActionFailedError if an action does, ChangedInputError for a layer that changes what it is given, and
        PeerLostError if a neighbour is gone.
        """
        actions = self._analyse(schedule)
        pieces = () if inputs is None else split_all(inputs, sizes)
        self._transport.begin_step(schedule, sizes, lengths)
        for index, stage in self._stages.items():
            stage.begin_step(step, objective if index == self._last else None)
        recording = self.recorder.begin_step(schedule)
        for action, keep in actions:
            self._watch(action, sizes[action.micro_batch], lengths)
            self._perform(action, keep, pieces, recording)
        for stage in self._stages.values():
            stage.finish_step()
        self._transport.finish_step()
        return recording

    def settle(self) -> None:
        """Before the executor is given up: the last step's tensors have left this process."""
        self._transport.settle()

    def _perform(self, action: Action, keep: Retain, pieces: Sequence[Tensors], recording: Recording) -> None:
        clock = self.recorder.clocks[action.stage]
        now, core_seconds = clock.now, clock.core_seconds
        begun = received = now()
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        first, last = action.stage == 0, action.stage == self._last
        transport = self._transport
        tensors: Sequence[torch.Tensor | None] = ()
        try:
            match action.kind:
                case Kind.F:
                    inputs = pieces[micro_batch] if first else transport.receive_forward(action.stage, micro_batch)
                    tensors = inputs
                    received, had = now(), core_seconds()
                    outputs = stage.forward(micro_batch, inputs, keep)
                    has, computed = core_seconds(), now()
                    if not last:
                        transport.send_forward(action.stage, micro_batch, outputs)
                    if keep is Retain.NOTHING:
                        transport.release(action.stage, micro_batch)
                case Kind.R:
                    had = core_seconds()
                    stage.recompute(micro_batch)
                    has, computed = core_seconds(), now()
                case Kind.B:
                    gradients = () if last else transport.receive_backward(action.stage, micro_batch)
                    tensors = gradients
                    received, had = now(), core_seconds()
                    returned = stage.backward(micro_batch, gradients)
                    has, computed = core_seconds(), now()
                    if not first:
                        transport.send_backward(action.stage, micro_batch, returned)
                    transport.release(action.stage, micro_batch)
            recording.action(action.stage, begun, received, computed, now(), has - had)
        except (PeerLostError, ChangedInputError):
            raise
        except Exception as error:
            kind = "gradient" if action.kind is Kind.B else "input"
            shapes = stage.layer_shapes if stage.layer_name else shapes_of(tensors)
            what = f"{kind} {shapes}" if shapes else f"micro-batch {micro_batch}"
            raise ActionFailedError(action, stage.layer_name, what, error) from error

    def _analyse(self, schedule: Schedule) -> list[tuple[Action, Retain]]:
        """This process's actions in order, and what each keeps; looked up by identity, since hashing costs
        O(actions)."""
        known = self._analysed.get(id(schedule))
        if known is None:
            kept = keeps(schedule)
            mine = [(a, kept.get(a, Retain.NOTHING)) for a in linearize(schedule) if a.stage in self._stages]
            known = self._analysed[id(schedule)] = (schedule, mine)
        return known[1]
