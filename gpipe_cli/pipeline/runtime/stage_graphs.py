"""CUDA graphs of a stage: the kernels of an action are captured once, then replayed by a single launch.

On a GPU the host takes longer to launch the kernels of a small layer than the GPU to run them. F, R, B, I and W of a
micro-batch are a graph each; sends, receives, the loss and its gradients stay outside, so any schedule and transport
can use graphs.

    memory, at the same addresses in every replay      replays
    -------------------------------------------------  -----------------------------------------------------------
    inputs                    per micro-batch          copied in, then read by F and R
    pool: activations         per micro-batch          written by F and R, read by B, I and W
    random states             per layer that draws     seeded, then read by F and R
    outputs                   shared                   written by F and R, then copied and sent
    gradients of outputs      shared                   copied in, then read by B and I
    gradients of inputs       shared                   written by B and I, then copied and sent
    gradients of parameters   shared                   added to by B and W; they are the `.grad` of parameters

"Per micro-batch": for each that is in flight with all activations, as many as the schedule has, and once more for
forwards that keep nothing, as in evaluation. The memory is in `static_memory.py`, the replays in
`captured_micro_batch.py`, the capture and its verification in `graph_capture.py`, what graphs take for granted in
`capture_guards.py`. This file decides which micro-batch is replayed when.

A changed guard has graphs captured again before the step, a few times. A layer that cannot be captured leaves its stage
to launch kernel by kernel; `fallback_reason` names the layer and the reason. A capture may also fail for a passing
reason: the device has no memory left, or the program keeps an autograd graph over the weights. It is tried again, after
twice as many steps each time.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

import torch

from gpipe_cli.pipeline.runtime.boundary import OptionalTensors, Tensors
from gpipe_cli.pipeline.runtime.capture_guards import Guards, UncapturableError, hooked_layer
from gpipe_cli.pipeline.runtime.captured_micro_batch import CapturedMicroBatch, CaptureKey, CaptureKind
from gpipe_cli.pipeline.runtime.graph_capture import GraphCapture
from gpipe_cli.pipeline.runtime.module_state import restoring_state
from gpipe_cli.pipeline.runtime.randomness import restoring_rng_state
from gpipe_cli.pipeline.runtime.static_memory import Seeds, StaticMemory
from gpipe_cli.system.accelerator import wait_for_device

_MAX_SHAPES = 16  # shapes of inputs with graphs, per stage: each takes memory of the driver, which no plan counts
_MAX_GUARD_CHANGES = 8  # after which a stage is not captured again
_MAX_GRAD_MASK_CHANGES = 4  # times that other outputs get a gradient than before


class StageCudaGraphs:
    """The graphs of a stage. `make_capture` makes what captures them in the given memory; `running_layer` names the
    layer that runs."""

    def __init__(self, make_capture: Callable[[StaticMemory], GraphCapture], running_layer: Callable[[], str]) -> None:
        self._running_layer = running_layer
        self._memory = StaticMemory(
            lambda storage: self._drop(lambda captured: captured.uses(storage)),
            lambda index: any(captured.index == index for captured in self._all_captured()),
        )
        self._capture = make_capture(self._memory)
        self._module, self._device = self._capture.module, self._capture.device
        self.capture_eagerly = False  # capture in the first step that could use graphs, and not in the second
        self.fallback_reason = ""  # why the stage is not replayed: the layer, and what is wrong with it
        self._given_up = False  # for good, as the reason will not pass
        self._usable = True  # in this step
        self.captures = 0  # micro-batches captured so far, including those whose graphs were dropped
        self._failures = 0  # captures that failed, and may succeed later
        self._next_try = 0  # the step from which on the next capture may be tried
        self._step = 0
        self._first_steps: dict[CaptureKey, int] = {}  # the first step with such micro-batches
        self._captured: dict[CaptureKey, list[CapturedMicroBatch]] = {}
        self._busy: dict[int, CapturedMicroBatch] = {}  # micro-batches in flight, by the indices of their pools
        # whether each output gets a gradient, where not all do that require it
        self._receives_grad: dict[CaptureKey, list[bool]] = {}
        self._grad_mask_changes = 0  # how often other outputs got a gradient than before
        self._guards: dict[bool, Guards] = {}  # of graphs for training, and for evaluation
        self._guard_changes = 0  # steps before which a guard had changed

    def begin_step(self) -> None:
        """Called before the first action: what graphs take for granted may have changed."""
        self._busy.clear()  # of a step that failed
        self._step += 1
        hooked = hooked_layer(self._module)
        if hooked and self.capture_eagerly:
            self._give_up(f"layer {hooked} has a hook, which is not called when it is replayed")
        guards = self._guards.get(self._module.training)
        changed = "" if guards is None or self._given_up else guards.find_change()
        self._guard_changes += bool(changed)
        if changed and (self._guard_changes > _MAX_GUARD_CHANGES or self.capture_eagerly):
            self._give_up(f"{changed} changes between steps")
        if self._given_up or changed:
            self.free_memory()
        self._usable = not self._given_up and not hooked

    def try_replay_forward(
        self, kind: CaptureKind, inputs: Tensors, seeds: Seeds, may_capture: Callable[[], bool]
    ) -> CapturedMicroBatch | None:
        """Replay the forward of a micro-batch. Returns the micro-batch, whose outputs hold until the next forward, or
        None if there is no graph for it. `may_capture` is False while the stage keeps an autograd graph: its nodes add
        up gradients on the stream on which they were made, which ends a capture on another stream."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        key = CaptureKey(kind, shapes, self._module.training)
        if not self._usable or (
            self._first_steps.setdefault(key, self._step) == self._step and not self.capture_eagerly
        ):
            return None
        ready = self._captured.get(key, [])
        captured = next((captured for captured in ready if captured.index not in self._busy), None)
        if captured is None:
            captured_shapes = {other.inputs for other in self._captured if other.training == key.training}
            if shapes not in captured_shapes and len(captured_shapes) >= _MAX_SHAPES:
                return None
            tried = self._step >= self._next_try and may_capture()
            captured = self._try_capture(key, inputs, seeds, verify=not ready) if tried else None
            if captured is None:
                return None
            self._captured.setdefault(key, []).append(captured)
        if kind is not CaptureKind.FORWARD:
            self._busy[captured.index] = captured
        captured.replay_forward(inputs, seeds)
        return captured

    def backward_matches(self, captured: CapturedMicroBatch, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the backward was captured for the outputs that get a gradient. If not, its layers have to run, as
        parameters that only another output depends on have no gradient; the micro-batch is then no longer in flight
        here, and the next capture is for these outputs."""
        receives_grad = [
            requires_grad and given is not None
            for given, requires_grad in zip(gradients, captured.requires_grad, strict=True)
        ]
        if receives_grad == captured.receives_grad:
            return True
        self._busy.pop(captured.index, None)
        if captured in self._captured.get(captured.key, ()):  # and not newer ones
            self._drop(lambda other: other.key == captured.key)
        self._grad_mask_changes += self._receives_grad.get(captured.key, receives_grad) != receives_grad
        self._receives_grad[captured.key] = receives_grad
        if self._grad_mask_changes > _MAX_GRAD_MASK_CHANGES:
            self._give_up("which of its outputs get a gradient changes from step to step")
        return False

    def backward(self, captured: CapturedMicroBatch, gradients: Sequence[torch.Tensor | None]) -> OptionalTensors:
        """B or I, for gradients that `backward_matches`: returns the gradients of the inputs."""
        captured.replay_backward(gradients)
        if captured.weights is None:
            self._busy.pop(captured.index, None)
        return tuple(None if gradient is None else gradient.clone() for gradient in captured.input_gradients)

    def backward_weights(self, captured: CapturedMicroBatch) -> None:
        """W."""
        captured.replay_weights()
        self._busy.pop(captured.index, None)

    def free_memory(self) -> None:
        """Free all memory; called between steps, as micro-batches in flight need theirs."""
        if self._captured:
            self._drop(lambda captured: True)
        self._memory.free()
        self._guards.clear()

    def _give_up(self, fallback_reason: str) -> None:
        self.fallback_reason, self._given_up, self._usable = fallback_reason, True, False

    def _drop(self, is_dropped: Callable[[CapturedMicroBatch], bool]) -> None:
        """Drop captured micro-batches; they are captured again when they are needed."""
        wait_for_device(self._device)  # the host may be ahead of their replays
        remaining = {
            key: [captured for captured in batches if not is_dropped(captured)]
            for key, batches in self._captured.items()
        }
        self._captured = {key: batches for key, batches in remaining.items() if batches}

    def _all_captured(self) -> Iterator[CapturedMicroBatch]:
        return chain(chain.from_iterable(self._captured.values()), self._busy.values())

    def _try_capture(
        self, key: CaptureKey, inputs: Tensors, seeds: Seeds, *, verify: bool
    ) -> CapturedMicroBatch | None:
        """Capture the graphs of a micro-batch and, to `verify` them, compare replays with the layers. Afterwards
        gradients and buffers are as before. Returns None, and sets the reason, if graphs cannot be captured or used;
        micro-batches in flight keep theirs."""
        keeps = key.kind is not CaptureKind.FORWARD
        index = next(index for index in count() if index not in self._busy) if keeps else -1
        parameters = self._module.parameters() if keeps else ()
        with restoring_rng_state([self._device]), self._memory.restoring_gradients(parameters):
            try:
                # a layer may have made tensors in its first call, which graphs read
                with restoring_state(self._module, keep_attributes=True, keep_buffers=True):
                    captured, expected = self._capture.capture(key, index, inputs, seeds, self._receives_grad.get(key))
                    if verify:
                        self._capture.verify_replay(captured, inputs, seeds, expected)
                    if key.training not in self._guards:
                        self._guards[key.training] = Guards(self._module)
            except Exception as error:  # layers, autograd and the driver may raise anything
                self._note_failure(error)
                return None
        self.captures += 1
        self.fallback_reason = ""
        return captured

    def _note_failure(self, error: Exception) -> None:
        """Set the reason and the step of the next try after a failed capture, and free what it has allocated."""
        if isinstance(error, UncapturableError):
            self._give_up(str(error))
        else:
            layer = self._running_layer()
            reason = (f"{type(error).__name__}: {error}".strip().splitlines() or [""])[0]
            self.fallback_reason = f"layer {layer}: {reason}" if layer else reason
        self._next_try = self._step + 2**self._failures
        self._failures += 1
        batches = [*self._all_captured()]
        self._memory.keep_only(
            {captured.index for captured in batches},
            set(chain.from_iterable(captured.trained for captured in batches)),
            lambda storage: any(captured.uses(storage) for captured in batches),
        )
