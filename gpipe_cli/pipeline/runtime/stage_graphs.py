"""The actions of a stage as graphs: what they launch is recorded once, and launched again as a whole.

On a GPU the host takes longer to launch the kernels of a small layer than the GPU to run them; a CUDA graph takes one
launch for all. F, R, B, I and W of a micro-batch are a graph each; what lies between them (sends, receives, the loss,
seeds) stays as it is, so any schedule and any transport can use them.

A graph reads and writes the same memory in every replay. So each micro-batch in flight has a slot: memory for its
inputs, and a pool for all that its graphs allocate. How many slots there are follows from the schedule: as many as it
has micro-batches in flight with all activations. Forwards that keep nothing, which evaluation has as well, take a
slot of their own. Outputs and gradients that go to other stages are copied from memory that all slots share. Graphs for
micro-batches of other shapes share this memory and the pools, as nothing stays in a slot that is free. So the bytes
held are those of the largest micro-batch, however many shapes there are (`planner/stage_memory.py`).

Python runs while a graph is recorded, and never again: what it reads would keep its value. So graphs are used only
where they are proven to be right: before the first use an action runs both ways on a real micro-batch, with other seeds
and values than those recorded, and all results must have the same bits. What has changed before a step has graphs
recorded anew, a few times: where weights are, attributes of modules and what they consist of, as pickle sees it (dicts,
lists, objects), and variables that a `forward` itself names, global and enclosing ones, if they are plain data. Not
seen is what changes within a step, what other functions read, attributes of classes, and objects in global variables.

Layers that cannot be recorded leave their stage as it was, launched kernel by kernel; `fallback_reason` says which and
why. A recording may also fail for a reason that passes: the device has no memory left, or the program keeps a graph of
autograd over the weights. It is tried again, after twice as many steps each time.
"""

import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain, compress, count
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_cli.pipeline.runtime.boundary import OptionalTensors, Tensors, checksum, same_bits
from gpipe_cli.pipeline.runtime.deferred_batch_norm import BatchMoments, BatchStatistics
from gpipe_cli.pipeline.runtime.deferred_weights import DeferredWeight, backward_inputs, backward_weights
from gpipe_cli.pipeline.runtime.module_state import python_and_numpy_rng_state, restoring_state
from gpipe_cli.pipeline.runtime.randomness import seed_generator
from gpipe_cli.pipeline.runtime.saved_activations import StorageBytes, counting_saved, storage_id
from gpipe_cli.system.accelerator import generators, is_accelerator, wait_for_device

_MAX_SHAPES = 16  # for which a stage has graphs: each takes memory of the driver, which no plan counts
_MAX_GUARD_CHANGES = 8  # after which a stage is not recorded again
_MAX_GRAD_MASK_CHANGES = 4  # times that other outputs get a gradient than before
_MAX_COMPARED_BYTES = 1 << 20  # of what is compared before each step
_SCALARS = (bool, int, float, str, type(None), tuple)
_DATA = frozenset((*_SCALARS, complex, bytes, list, dict, set))
_CODE = type, ModuleType, FunctionType, BuiltinFunctionType
_OF_MODULES = vars(nn.Module()).keys()  # attributes that every module has


class CudaGraph(Protocol):
    """What was launched while it was recorded."""

    def replay(self) -> None:
        """Launch it again, on the memory that it had then."""


class RngState(Protocol):
    """A state of the device's random generator, which graphs read when they are replayed."""

    def manual_seed(self, seed: int) -> object: ...


class CudaGraphCapturer(Protocol):
    """Records graphs on one device (`system/cuda_graphs.py`)."""

    def new_pool(self) -> Any:
        """Memory for graphs of which only one is in use at a time."""

    def new_rng_state(self) -> RngState: ...

    def on_capture_stream(self) -> AbstractContextManager[object]:
        """Inside, work is launched where graphs are recorded: on a stream of its own."""

    def forbid_sync(self) -> AbstractContextManager[object]:
        """Inside, what makes the host wait for the device raises RuntimeError, in all threads: a recording that fails
        so late may leave older releases of torch recording."""

    def capture(self, pool: Any, rng: Sequence[Any]) -> AbstractContextManager[CudaGraph]:
        """Inside, what is launched is recorded, and need not run. It draws random numbers from any of `rng`."""

    def use_rng_state(self, rng: Any) -> None:
        """While a graph is recorded: draw from `rng` from here on; None: from the default generator."""


class CaptureKind(Enum):
    """What a micro-batch's graphs are for."""

    FORWARD = "a forward that keeps nothing"
    WHOLE = "a forward that keeps all, and B"
    SPLIT = "a forward that keeps all, I and W"


class UncapturableError(Exception):
    """A layer cannot be recorded, or would be wrong when it is replayed."""


Seeds: TypeAlias = Callable[[int], int]
"""The seed of each layer of the stage, by its place in the stage."""
Compute: TypeAlias = Callable[[Tensors, bool, Callable[[int], None]], tuple[Tensors, Tensors]]
"""Runs the layers on inputs, with a graph of autograd or without one; calls the function before each layer, with its
place. Returns the inputs as leaves of autograd's graph, and the outputs."""
_Shapes: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]
_Key: TypeAlias = tuple[CaptureKind, _Shapes, bool]
"""What graphs are for: also the shapes of the inputs, and whether it is training."""


@dataclass(eq=False)
class CapturedMicroBatch:
    """The graphs of a micro-batch in flight and the memory that they read and write."""

    key: _Key
    index: int  # of its pool
    inputs: Tensors  # leaves of autograd's graph, if there is one
    forward: CudaGraph
    outputs: Tensors  # in memory that the next forward of any slot overwrites
    requires_grad: Sequence[bool]  # whether each output requires a gradient
    receives_grad: Sequence[bool]  # whether each output gets one: not if nothing makes use of it
    moments: BatchMoments  # of batch norms, written by a forward
    saved: StorageBytes  # what the forward keeps for the backward
    gradients: Tensors = ()  # of those outputs that get one, read while `backward` runs
    input_gradients: OptionalTensors = ()  # in memory that the next backward of any slot overwrites
    backward: CudaGraph | None = None  # B or I
    weights: CudaGraph | None = None  # W
    saved_for_w: tuple[StorageBytes, StorageBytes] | None = None  # of I: gradients that it keeps, and what its W needs
    trained: Sequence[nn.Parameter] = ()  # that get a gradient

    def uses(self, storage: torch.UntypedStorage) -> bool:
        tensors = (*self.inputs, *self.outputs, *self.gradients, *self.input_gradients)
        return any(tensor is not None and storage_id(tensor) == storage._cdata for tensor in tensors)


class StageCudaGraphs:
    """The graphs of one stage, whose layers `compute` runs. Their batch norms write to `statistics`."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        capturer: CudaGraphCapturer,
        statistics: BatchStatistics,
        compute: Compute,
        running_layer: Callable[[], str],
    ) -> None:
        self._module, self._device, self._capturer, self._statistics = module, device, capturer, statistics
        self._compute, self._running_layer = compute, running_layer
        self.capture_eagerly = (
            False  # whether graphs are made in the first step that could use them, and not in the second
        )
        self.fallback_reason = ""  # why the stage is not replayed: the layer, and what is wrong with it
        self._given_up = False  # for good, as the cause will not pass
        self._failures = 0  # recordings that failed, and may succeed later
        self._next_try = 0  # the step from which on the next recording may be tried
        self.captures = 0  # slots recorded so far, those that were dropped included
        self._step = 0
        self._first_steps: dict[_Key, int] = {}  # the first step with such micro-batches
        self._captured: dict[_Key, list[CapturedMicroBatch]] = {}
        # whether each output gets a gradient, where not all do that require one
        self._receives_grad: dict[_Key, list[bool]] = {}
        self._busy: dict[int, CapturedMicroBatch] = {}  # micro-batches in flight, by the numbers of their pools
        self._pools: dict[int, object] = {}
        # outside the pools, by what lies there: tensors of all shapes take turns
        self._memory: dict[tuple[str, int], torch.UntypedStorage] = {}
        self._rng_states: dict[int, RngState] = {}  # of the layers that draw random numbers, by place
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}  # memory of parameters' gradients, in every step
        self._guards: dict[bool, _Guards] = {}  # what graphs of training, and of evaluation, take for granted
        self._usable = True  # in this step
        self._guard_changes = 0  # how often what graphs take for granted had changed
        self._grad_mask_changes = 0  # how often other outputs got a gradient than before

    def begin_step(self) -> None:
        """Called before the first action: what graphs take for granted may have changed."""
        self._busy.clear()  # of a step that failed
        self._step += 1
        hooked = _hooked_layer(self._module)
        if hooked and self.capture_eagerly:
            self._give_up(f"layer {hooked} has a hook, which is not called when it is replayed")
        guards = self._guards.get(self._module.training)
        changed = "" if guards is None or self._given_up else guards.changed()
        self._guard_changes += bool(changed)
        if changed and (self._guard_changes > _MAX_GUARD_CHANGES or self.capture_eagerly):
            self._give_up(f"{changed} changes between steps")
        if self._given_up or changed:
            self.free_memory()
        self._usable = not self._given_up and not hooked

    def _give_up(self, fallback_reason: str) -> None:
        self.fallback_reason, self._given_up, self._usable = fallback_reason, True, False

    def try_replay_forward(
        self, kind: CaptureKind, inputs: Tensors, seeds: Seeds, may_capture: Callable[[], bool]
    ) -> CapturedMicroBatch | None:
        """Replay the forward of a micro-batch; returns its slot, whose outputs hold until the next forward, or None if
        there is no graph for it. Not `may_capture`: while the stage keeps a graph of autograd, whose nodes add up
        gradients on the stream on which they were made, which ends a recording on another."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        key = kind, shapes, self._module.training
        if not self._usable or (
            self._first_steps.setdefault(key, self._step) == self._step and not self.capture_eagerly
        ):
            return None
        ready = self._captured.get(key, [])
        captured = next((captured for captured in ready if captured.index not in self._busy), None)
        if captured is None:
            captured_shapes = {shapes for _, shapes, training in self._captured if training == self._module.training}
            if shapes not in captured_shapes and len(captured_shapes) >= _MAX_SHAPES:
                return None
            tried = self._step >= self._next_try and may_capture()
            captured = self._try_capture(key, inputs, seeds, verify=not ready) if tried else None
            if captured is None:
                return None
            self._captured.setdefault(key, []).append(captured)
        if kind is not CaptureKind.FORWARD:
            self._busy[captured.index] = captured
        self._replay_forward(captured, inputs, seeds)
        return captured

    def backward(self, captured: CapturedMicroBatch, gradients: Sequence[torch.Tensor | None]) -> OptionalTensors:
        """B or I: returns the gradients of the inputs. `gradients`: of the outputs, those for which it
        `backward_matches`."""
        self._replay_backward(
            captured, [gradient for gradient in compress(gradients, captured.receives_grad) if gradient is not None]
        )
        if captured.weights is None:
            self._busy.pop(captured.index, None)
        return tuple(None if gradient is None else gradient.clone() for gradient in captured.input_gradients)

    def backward_weights(self, captured: CapturedMicroBatch) -> None:
        """W."""
        assert captured.weights is not None
        self._use_static_grads(captured.trained)
        captured.weights.replay()
        self._busy.pop(captured.index, None)

    def _replay_forward(self, captured: CapturedMicroBatch, inputs: Tensors, seeds: Seeds) -> None:
        _copy(inputs, captured.inputs)
        for place, rng in self._rng_states.items():
            rng.manual_seed(seeds(place))
        captured.forward.replay()

    def backward_matches(self, captured: CapturedMicroBatch, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether those outputs of the slot get a gradient for which its backward was recorded. Else the layers have to
        run, as parameters that only another output depends on have no gradient, and the slot is free; the next ones are
        recorded for these outputs."""
        receives_grad = [
            requires_grad and given is not None
            for given, requires_grad in zip(gradients, captured.requires_grad, strict=True)
        ]
        if receives_grad == captured.receives_grad:
            return True
        self._busy.pop(captured.index, None)
        if captured in self._captured.get(captured.key, ()):  # and not newer ones
            wait_for_device(self._device)
            del self._captured[captured.key]
        self._grad_mask_changes += self._receives_grad.get(captured.key, receives_grad) != receives_grad
        self._receives_grad[captured.key] = receives_grad
        if self._grad_mask_changes > _MAX_GRAD_MASK_CHANGES:
            self._give_up("which of its outputs get a gradient changes from step to step")
        return False

    def _replay_backward(self, captured: CapturedMicroBatch, gradients: Sequence[torch.Tensor]) -> None:
        _copy(gradients, captured.gradients)
        self._use_static_grads(captured.trained)
        assert captured.backward is not None
        captured.backward.replay()

    @torch.no_grad()
    def _use_static_grads(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let parameters have the gradients that graphs add to, with the values so far; zeros if there are none."""
        zeros = []
        for parameter in parameters:
            static = self._gradients[parameter]
            if parameter.grad is None:
                zeros.append(static)
            elif parameter.grad is not static:
                static.copy_(parameter.grad)
            parameter.grad = static
        if zeros:
            torch._foreach_zero_(zeros)

    @property
    def static_bytes(self) -> int:
        """The bytes held between steps, those of the pools left out."""
        return sum(storage.nbytes() for storage in self._memory.values())

    def _static_buffer(self, contents: str, place: int, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for tensors like this one, which graphs for all shapes share. If it is too small, graphs that were
        recorded with it are dropped, as they would keep it; they are recorded again when they are needed."""
        shape, strides = tensor.shape, tensor.stride()
        static = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        storage = self._memory.get((contents, place))
        if storage is not None and storage.nbytes() >= static.untyped_storage().nbytes():
            return static.set_(storage, 0, shape, strides)
        if storage is not None:
            wait_for_device(self._device)
            remaining = {
                key: [captured for captured in batches if not captured.uses(storage)]
                for key, batches in self._captured.items()
            }
            self._captured = {key: batches for key, batches in remaining.items() if batches}
        self._memory[contents, place] = static.untyped_storage()
        return static

    def free_memory(self) -> None:
        """Free all memory; called between steps, as micro-batches in flight need theirs."""
        if self._captured:
            wait_for_device(self._device)  # the host may be ahead of replays of graphs that are dropped
        self._captured.clear()
        self._pools.clear()
        self._memory.clear()
        self._guards.clear()
        self._gradients.clear()

    def _try_capture(self, key: _Key, inputs: Tensors, seeds: Seeds, *, verify: bool) -> CapturedMicroBatch | None:
        """Record the graphs of a slot and, to `verify` them, compare their results with those of the layers. Afterwards
        gradients and buffers are as before. Returns None, and sets the cause, if they cannot be used or made;
        micro-batches in flight go on with theirs."""
        gradients_before = dict[nn.Parameter, torch.Tensor]()
        for parameter in self._module.parameters() if key[0] is not CaptureKind.FORWARD else ():
            gradient, static = parameter.grad, self._gradients.get(parameter)
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if static is None and gradient.stride() == parameter.stride():
                static = self._gradients[parameter] = gradient
            if static is gradient:  # on the host, as plans have no memory for a second set of gradients
                gradients_before[parameter] = gradient.to("cpu", copy=True)
        random = [(generator, generator.get_state()) for generator in generators(self._device)]
        try:
            with restoring_state(self._module) as attributes:
                captured, expected = self._capture(key, inputs, seeds)
                if verify:
                    self._verify_replay(captured, inputs, seeds, expected)
                if self._module.training not in self._guards:
                    self._guards[self._module.training] = _Guards(self._module)
                attributes.clear()  # a layer may have made tensors in its first call, which graphs read
        except Exception as error:  # layers, autograd and the driver may raise anything
            reason = str(error) if isinstance(error, UncapturableError) else f"{type(error).__name__}: {error}"
            layer = self._running_layer()
            where = f"layer {layer}: " if layer and not isinstance(error, UncapturableError) else ""
            self.fallback_reason = where + (reason.strip().splitlines() or [""])[0]
            if isinstance(error, UncapturableError):
                self._give_up(self.fallback_reason)
            self._next_try = self._step + 2**self._failures
            self._failures += 1
            self._free_unused()
            return None
        finally:
            with torch.no_grad():
                for parameter, value in gradients_before.items():
                    parameter.grad = parameter.grad if parameter.grad is None else parameter.grad.copy_(value)
            for generator, state in random:
                generator.set_state(state)
        self.captures += 1
        self.fallback_reason = ""
        return captured

    def _free_unused(self) -> None:
        """Free what no slot uses, after a recording that has failed."""
        batches = [*chain.from_iterable(self._captured.values()), *self._busy.values()]
        indices = {captured.index for captured in batches}
        trained = set(chain.from_iterable(captured.trained for captured in batches))
        self._pools = {index: pool for index, pool in self._pools.items() if index in indices}
        self._gradients = {parameter: static for parameter, static in self._gradients.items() if parameter in trained}
        self._memory = {
            at: memory for at, memory in self._memory.items() if any(captured.uses(memory) for captured in batches)
        }

    def _capture(self, key: _Key, inputs: Tensors, seeds: Seeds) -> tuple[CapturedMicroBatch, "_Results"]:
        """Record the graphs of a slot; returns it, and what the layers themselves give for `inputs`."""
        keeps = key[0] is not CaptureKind.FORWARD
        index = next(index for index in count() if index not in self._busy) if keeps else -1
        # other values and seeds than those of the proof: what is read from them while recording shows there
        others = _different_seeds(seeds)
        moments = self._statistics.new_moments()
        with self._capturer.on_capture_stream():
            contents = f"inputs of slot {index}"
            static = tuple(self._static_buffer(contents, place, given) for place, given in enumerate(inputs))
            _copy(map(_different_values, inputs), static)
            self._run_layers(key, static, others, moments)
            expected = self._run_layers(key, inputs, seeds, self._statistics.new_moments(), second_run=True)
            pool = self._pools.setdefault(index, self._capturer.new_pool())
            requires_grad = [output.requires_grad for output in expected.outputs]
            receives_grad = self._receives_gradient(key, expected.outputs)
            static_outputs = tuple(
                self._static_buffer("outputs", place, like) for place, like in enumerate(expected.outputs)
            )
            trained = [weight for name, weight in self._module.named_parameters() if name in expected.checksums]
            for parameter in trained:
                parameter.grad = self._gradients[parameter]

            def draw(place: int) -> None:
                self._capturer.use_rng_state(self._rng_states.get(place))

            saved = StorageBytes(self._lasting_storages(moments), static)
            for place, rng in self._rng_states.items():
                rng.manual_seed(others(place))
            rng_states = list(self._rng_states.values())
            with (
                self._capturer.capture(pool, rng_states) as forward,
                self._statistics.writing_to(moments),
                counting_saved(saved),
            ):
                leaves, outputs = self._compute(static, keeps, draw)
                self._capturer.use_rng_state(None)
                _copy(outputs, static_outputs)
            captured = CapturedMicroBatch(
                key, index, leaves, forward, static_outputs, requires_grad, receives_grad, moments, saved,
                trained=trained if keeps else (),
            )  # fmt: skip
            if keeps:
                roots = [get_gradient_edge(output) for output, gets in zip(outputs, receives_grad, strict=True) if gets]
                captured.gradients = tuple(
                    self._static_buffer("gradients of outputs", place, static_outputs[place])
                    for place in compress(count(), receives_grad)
                )
                captured.input_gradients = tuple(
                    None if gradient is None else self._static_buffer("gradients of inputs", place, gradient)
                    for place, gradient in enumerate(expected.input_gradients)
                )
                del outputs
                self._capture_backward(captured, pool, roots)
        return captured, expected

    def _capture_backward(self, captured: CapturedMicroBatch, pool: object, roots: list[GradientEdge]) -> None:
        split = captured.key[0] is CaptureKind.SPLIT
        lasting = self._lasting_storages(captured.moments)
        gradients, weights = StorageBytes(lasting), StorageBytes(lasting, captured.inputs)
        deferred: list[DeferredWeight] = []
        with self._capturer.capture(pool, ()) as captured.backward:
            if split and roots:
                # copies, as W may need them
                copies = tuple(gradient.clone() for gradient in captured.gradients)
                deferred = backward_inputs(roots, copies, lambda saved: gradients.add((saved,)))
            elif roots:
                torch.autograd.backward(roots, captured.gradients)
            _copy((leaf.grad for leaf in captured.inputs), captured.input_gradients)
        for leaf in captured.inputs:
            leaf.grad = None  # frees its memory in the pool for other graphs
        if not split:
            return
        weights.add(chain.from_iterable(weight.saved for weight in deferred))
        captured.saved_for_w = gradients, weights
        with self._capturer.capture(pool, ()) as captured.weights:
            backward_weights(deferred)

    def _lasting_storages(self, moments: BatchMoments) -> set[int]:
        """The storages that outlive a micro-batch."""
        tensors = (*self._module.parameters(), *self._module.buffers(), *(captured.moments for captured in moments))
        return {storage_id(tensor) for tensor in tensors}

    def _run_layers(
        self, key: _Key, inputs: Tensors, seeds: Seeds, moments: BatchMoments, *, second_run: bool = False
    ) -> "_Results":
        """Run forward and backward, twice before they are recorded: libraries set themselves up, and layers keep what
        they keep from a first call. Finds the layers that draw random numbers, and makes the memory of gradients.
        Outputs require a gradient where the layers' do; no gradient of a parameter is kept until the next is computed,
        as plans have no memory for them. Raises UncapturableError for layers that keep something from each call."""
        keeps = key[0] is not CaptureKind.FORWARD
        guards = _Guards(self._module)
        # by version and by value, as fused operations and writes through `.data` are not counted
        buffers = [(name, b, b._version, checksum(b)) for name, b in self._module.named_buffers()]
        others, watch = python_and_numpy_rng_state(), _Watch(self._device, self._module, seeds)
        checksums: dict[str, torch.Tensor] = {}

        def free_gradient(name: str, parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            if second_run:
                checksums[name] = checksum(parameter.grad)
                if parameter not in self._gradients:
                    self._gradients[parameter] = torch.zeros_like(parameter.grad)
            parameter.grad = None

        with (
            ExitStack() as hooks,
            self._statistics.writing_to(moments),
            self._capturer.forbid_sync() if second_run else nullcontext(),
        ):
            for name, weight in self._module.named_parameters():
                if weight.requires_grad:
                    hooks.enter_context(weight.register_post_accumulate_grad_hook(partial(free_gradient, name)))
            leaves, outputs = self._compute(inputs, keeps, watch.before_layer)
            watch.after_layer()
            roots = list(compress(outputs, self._receives_gradient(key, outputs)))
            if keeps and roots:
                torch.autograd.backward(roots, [root.detach() for root in roots])
        if python_and_numpy_rng_state() != others:
            raise UncapturableError("a layer draws from Python's random module or numpy.random")
        for place in watch.drawing_layers:
            if place not in self._rng_states:
                self._rng_states[place] = self._capturer.new_rng_state()
        without_autograd = tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)
        if second_run:
            if changed := guards.changed():
                raise UncapturableError(f"{changed} changes whenever it runs")
            for name, buffer, version, value in buffers:
                # a recomputation would change it again
                if buffer._version != version or not torch.equal(checksum(buffer), value):
                    layer, _, changed = name.partition(".")
                    raise UncapturableError(f"layer {layer}: {changed} changes whenever it runs")
        return _Results(without_autograd, tuple(leaf.grad for leaf in leaves), moments, checksums)

    def _receives_gradient(self, key: _Key, outputs: Tensors) -> list[bool]:
        """Whether each output gets a gradient."""
        return self._receives_grad.get(key) or [output.requires_grad for output in outputs]

    def _verify_replay(self, captured: CapturedMicroBatch, inputs: Tensors, seeds: Seeds, expected: "_Results") -> None:
        """Raises UncapturableError if the graphs give other bits than the layers."""
        for parameter in self._module.parameters():
            parameter.grad = None
        self._replay_forward(captured, inputs, seeds)
        if captured.backward is not None:
            self._replay_backward(captured, [*compress(expected.outputs, captured.receives_grad)])
            if captured.weights is not None:
                captured.weights.replay()
        named = self._module.named_parameters()
        checksums = {name: checksum(weight.grad) for name, weight in named if weight.grad is not None}
        replayed = _Results(captured.outputs, captured.input_gradients, captured.moments, checksums).named()
        for name, value in expected.named().items():
            if name not in replayed or not same_bits(replayed[name], value):
                raise UncapturableError(f"{name} has other bits when the layers are replayed")
            del replayed[name]
        if replayed:
            raise UncapturableError(f"{min(replayed)} is None unless the layers are replayed")


class _Results(NamedTuple):
    """What a forward and a backward give. Outputs and gradients of inputs may be in memory that is used again."""

    outputs: Tensors
    input_gradients: OptionalTensors
    moments: BatchMoments
    checksums: dict[str, torch.Tensor]  # of the gradients of parameters, by their names

    def named(self) -> dict[str, torch.Tensor]:
        moments = [norm.moments for norm in self.moments]
        inputs = "the gradient of input", self.input_gradients
        named = {f"the gradient of {name}": value for name, value in self.checksums.items()}
        for what, tensors in (("output", self.outputs), inputs, ("the moments of batch norm", moments)):
            named |= {f"{what} {index}": tensor for index, tensor in enumerate(tensors) if tensor is not None}
        return named


@dataclass
class _Watch:
    """Seeds each layer, and finds those that draw random numbers."""

    device: torch.device
    module: nn.Module
    seeds: Seeds
    drawing_layers: list[int] = field(default_factory=list)
    _place: int = -1
    _states: list[torch.Tensor] = field(default_factory=list)

    def before_layer(self, place: int) -> None:
        self.after_layer()
        seed_generator(self.device, self.seeds(place))
        self._place, self._states = place, [generator.get_state() for generator in generators(self.device)]

    def after_layer(self) -> None:
        for index, (generator, before) in enumerate(zip(generators(self.device), self._states, strict=False)):
            if torch.equal(generator.get_state(), before):
                continue
            if is_accelerator(self.device) and index == 0:
                name = [name for name, _ in self.module.named_children()][self._place]
                raise UncapturableError(f"layer {name} draws random numbers on the CPU")
            self.drawing_layers.append(self._place)
        self._states = []


class _Guards:
    """What graphs of a module take for granted (see above). Raises UncapturableError for what cannot be compared."""

    def __init__(self, module: nn.Module) -> None:
        named = [(f"layer {name.partition('.')[0]}: ", inner) for name, inner in module.named_modules()]
        self._modules = [inner for _, inner in named]
        self._values = [
            (values, key, value, layer + key)
            for layer, inner in named
            for values in (vars(inner), inner._modules, inner._parameters, inner._buffers)
            for key, value in values.items()
            if values is not vars(inner) or key not in _OF_MODULES
        ]
        self._tensors = [*module.parameters(), *module.buffers()]
        self._registered = set(map(id, (*self._modules, *self._tensors)))
        self._states = self._current_state()
        read = {
            id(value): (name, value)
            for _, key, value, name in self._values
            # the engine's own forward has a state
            if key != "forward" and id(value) not in self._registered and not _is_constant(value)
        }
        for layer, inner in named:
            forward = inspect.unwrap(type(inner).forward)
            if isinstance(forward, FunctionType):
                read.setdefault(id(forward), (f"{layer}a variable that its forward reads", forward))
        self._read = [(*named_value, self._describe(named_value[1])) for named_value in read.values()]
        for name, _, described in self._read:
            if isinstance(described, str):
                raise UncapturableError(f"{name} {described}")

    def changed(self) -> str:
        """The name of what is another, elsewhere, or has other contents; "" if nothing is."""
        for values, key, value, name in self._values:
            current = values.get(key)
            if current is not value and not (
                isinstance(value, _SCALARS) and type(current) is type(value) and bool(current == value)
            ):
                return name
        if self._current_state() != self._states:
            return "where its weights are"
        return next((name for name, value, was in self._read if self._describe(value) != was), "")

    def _describe(self, value: Any) -> bytes | str:
        """All that an object consists of; of code, tensors, and modules of the stage, which they are; or why not."""
        described = io.BytesIO()
        pickler = _Describer(described, protocol=5)
        pickler.registered = self._registered
        try:
            pickler.dump(_variables(value) if isinstance(value, FunctionType) else value)
        except Exception:  # objects themselves say what they consist of
            return "cannot be compared from step to step"
        return (
            described.getvalue()
            if described.tell() <= _MAX_COMPARED_BYTES
            else "is too large to be compared in each step"
        )

    def _current_state(self) -> list[Any]:
        """Where each tensor is and whether it is trained, and the mode of each module."""
        tensors = ((tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors)
        return [*tensors, *(inner.training for inner in self._modules)]


class _Describer(pickle.Pickler):
    registered: set[int]

    def persistent_id(self, value: Any) -> Any:
        if type(value) in _DATA:
            return None
        if isinstance(value, _CODE) or id(value) in self.registered:
            return id(value)
        if not isinstance(value, torch.Tensor):
            return None
        # a graph of a GPU has the value of a tensor of the CPU
        return id(value), value.data_ptr(), value._version if value.device.type == "cpu" else 0


def _is_constant(value: Any) -> bool:
    return all(isinstance(part, _SCALARS[:-1]) for part in (value if isinstance(value, tuple) else (value,)))


def _variables(function: FunctionType) -> dict[str, Any]:
    """The variables of a function's module and of enclosing functions that it names: plain data by value."""
    values = {key: function.__globals__.get(key) for key in function.__code__.co_names}
    enclosing = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values |= {key: cell.cell_contents for key, cell in enclosing}
    return {key: value if type(value) in _DATA else id(value) for key, value in values.items()}


def _different_seeds(seeds: Seeds) -> Seeds:
    return lambda place: seeds(place) ^ 1


def _different_values(given: torch.Tensor) -> torch.Tensor:
    """Values that layers take as well: those of other samples or, unless they are indices, of other places."""
    if given.shape[:1] != (1,):
        return given.roll(1, 0)
    return given.roll(1) if given.is_floating_point() else given


@torch.no_grad()
def _copy(tensors: Iterable[torch.Tensor | None], into: Iterable[torch.Tensor | None]) -> None:
    for tensor, static in zip(tensors, into, strict=True):
        if static is not None:
            assert tensor is not None
            static.copy_(tensor)


def _hooked_layer(module: nn.Module) -> str:
    """The first layer with a hook of its modules or parameters, which a graph would not call; "" if there is none."""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    for name, layer in module._modules.items():
        to_visit = [layer]
        while to_visit:  # four times as fast as `modules`, which builds the names of all
            inner = to_visit.pop()
            if inner is None:
                continue
            attributes = vars(inner)
            if any(attributes[kind] for kind in hooks):
                return name
            for parameter in attributes["_parameters"].values():
                if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                    return name
            to_visit += attributes["_modules"].values()
    return ""
