"""Captures the graphs of a micro-batch, and verifies that replays give the bits of the layers.

What Python reads while a graph is captured keeps its value. So a graph is captured with other seeds and values than the
real micro-batch has, on which it is then verified: outputs, gradients and moments of batch norms must have the same
bits as when the layers themselves run.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, count
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_cli.pipeline.runtime.boundary import OptionalTensors, Tensors, checksum, same_bits, without_graph
from gpipe_cli.pipeline.runtime.capture_guards import Guards, UncapturableError
from gpipe_cli.pipeline.runtime.captured_micro_batch import CapturedMicroBatch, CaptureKey, CaptureKind
from gpipe_cli.pipeline.runtime.deferred_batch_norm import BatchMoments, BatchStatistics
from gpipe_cli.pipeline.runtime.deferred_weights import DeferredWeight, backward_inputs, backward_weights
from gpipe_cli.pipeline.runtime.module_state import python_and_numpy_rng_state
from gpipe_cli.pipeline.runtime.randomness import seed_generator
from gpipe_cli.pipeline.runtime.saved_activations import StorageBytes, counting_saved, storage_id
from gpipe_cli.pipeline.runtime.static_memory import Seeds, StaticMemory, copy_into
from gpipe_cli.system.accelerator import generators, is_accelerator
from gpipe_cli.system.cuda_graphs import CudaGraphCapturer

Compute: TypeAlias = Callable[[Tensors, bool, Callable[[int], None]], tuple[Tensors, Tensors]]
"""Runs the layers on inputs, with an autograd graph or without; calls the function before each layer, with its place.
Returns the inputs, as leaves of the autograd graph, and the outputs."""


class Results(NamedTuple):
    """What a forward and a backward compute. Outputs and gradients of inputs may be in memory that is reused."""

    outputs: Tensors
    input_gradients: OptionalTensors
    moments: BatchMoments
    checksums: dict[str, torch.Tensor]  # of the gradients of parameters, by their names

    def by_name(self) -> dict[str, torch.Tensor]:
        inputs = "the gradient of input", self.input_gradients
        named = {f"the gradient of {name}": value for name, value in self.checksums.items()}
        for what, tensors in (("output", self.outputs), inputs, ("the moments of batch norm", (self.moments.flat,))):
            named |= {f"{what} {index}": tensor for index, tensor in enumerate(tensors) if tensor is not None}
        return named


class GraphCapture:
    """Captures graphs of a stage, in `memory`. `compute` runs its layers, whose batch norms write to `statistics`."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        capturer: CudaGraphCapturer,
        statistics: BatchStatistics,
        compute: Compute,
        memory: StaticMemory,
    ) -> None:
        self.module, self.device, self._capturer, self._statistics = module, device, capturer, statistics
        self._compute, self._memory = compute, memory

    def capture(
        self, key: CaptureKey, index: int, inputs: Tensors, seeds: Seeds, receives_grad: Sequence[bool] | None
    ) -> tuple[CapturedMicroBatch, Results]:
        """Capture the graphs of a micro-batch, for the pool `index`. `receives_grad`: whether each output gets a
        gradient; None: those that require it. Also returns what the layers themselves compute for `inputs`. Raises
        UncapturableError for layers that cannot be captured, and whatever layers, autograd and the driver raise."""
        keeps = key.kind is not CaptureKind.FORWARD
        memory = self._memory
        moments = self._statistics.new_moments()
        with self._capturer.on_capture_stream():
            # 1. Warm up, with other values and seeds; then run on the real ones.
            contents = f"inputs of micro-batch {index}"
            static = tuple(memory.buffer(contents, place, given) for place, given in enumerate(inputs))
            copy_into(static, map(_different_values, inputs))
            others = _different_seeds(seeds)
            self._run_layers(static, others, moments, receives_grad, keeps=keeps)
            real_moments = self._statistics.new_moments()
            expected = self._run_layers(inputs, seeds, real_moments, receives_grad, keeps=keeps, second_run=True)

            # 2. Capture the forward. No buffer is made afterwards: if it replaced one, graphs would be dropped.
            requires_grad = [output.requires_grad for output in expected.outputs]
            receives_grad = receives_grad or requires_grad
            static_outputs = tuple(memory.buffer("outputs", place, like) for place, like in enumerate(expected.outputs))
            gradients = tuple(
                memory.buffer("gradients of outputs", place, static_outputs[place])
                for place in compress(count(), receives_grad if keeps else ())
            )
            input_gradients = tuple(
                None if gradient is None else memory.buffer("gradients of inputs", place, gradient)
                for place, gradient in enumerate(expected.input_gradients)
            )
            pool = memory.pool(index, self._capturer.new_pool)
            trained = [weight for name, weight in self.module.named_parameters() if name in expected.checksums]
            for parameter in trained:
                parameter.grad = memory.gradients[parameter]
            saved = StorageBytes(self._lasting_storages(moments), static)
            memory.seed(others)
            with (
                self._capturer.capture(pool, list(memory.rng_states.values())) as forward,
                self._statistics.writing_to(moments),
                counting_saved(saved),
            ):
                leaves, outputs = self._compute(
                    static, keeps, lambda place: self._capturer.use_rng_state(memory.rng_states.get(place))
                )
                self._capturer.use_rng_state(None)
                copy_into(static_outputs, outputs)
            captured = CapturedMicroBatch(
                key, index, memory, leaves, forward, static_outputs, requires_grad, receives_grad, moments, saved,
                gradients, input_gradients, trained=trained if keeps else (),
            )  # fmt: skip

            # 3. Capture the backward.
            if keeps:
                roots = [get_gradient_edge(output) for output, gets in zip(outputs, receives_grad, strict=True) if gets]
                del outputs
                self._capture_backward(captured, pool, roots)
        return captured, expected

    def _capture_backward(self, captured: CapturedMicroBatch, pool: object, roots: list[GradientEdge]) -> None:
        split = captured.key.kind is CaptureKind.SPLIT
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
            copy_into(captured.input_gradients, (leaf.grad for leaf in captured.inputs))
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
        tensors = (*self.module.parameters(), *self.module.buffers(), moments.flat)
        return {storage_id(tensor) for tensor in tensors}

    def _run_layers(
        self,
        inputs: Tensors,
        seeds: Seeds,
        moments: BatchMoments,
        receives_grad: Sequence[bool] | None,
        *,
        keeps: bool,
        second_run: bool = False,
    ) -> Results:
        """Run forward and, if it `keeps` activations, backward, twice before the capture: libraries set themselves up,
        and layers keep what they keep from a first call. Finds the layers that draw random numbers, and allocates the
        static gradients. Outputs require a gradient where the layers' do; no gradient of a parameter is kept until the
        next is computed, as plans have no memory for them. Raises UncapturableError for layers that keep something from
        each call."""
        guards = Guards(self.module)
        # by version and by value, as fused operations and writes through `.data` are not counted
        buffers = [(name, b, b._version, checksum(b)) for name, b in self.module.named_buffers()]
        python_and_numpy = python_and_numpy_rng_state()
        draws = _DrawingLayers(self.device, self.module, seeds)
        checksums: dict[str, torch.Tensor] = {}

        def free_gradient(name: str, parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            if second_run:
                checksums[name] = checksum(parameter.grad)
                if parameter not in self._memory.gradients:
                    self._memory.gradients[parameter] = torch.zeros_like(parameter.grad)
            parameter.grad = None

        with ExitStack() as hooks, self._capturer.forbid_sync() if second_run else nullcontext():
            for name, weight in self.module.named_parameters():
                if weight.requires_grad:
                    hooks.enter_context(weight.register_post_accumulate_grad_hook(partial(free_gradient, name)))
            with self._statistics.writing_to(moments):  # not in the backward, where a layer may recompute itself
                leaves, outputs = self._compute(inputs, keeps, draws.before_layer)
            draws.after_layer()
            roots = list(compress(outputs, receives_grad or [output.requires_grad for output in outputs]))
            if keeps and roots:
                torch.autograd.backward(roots, [root.detach() for root in roots])
        if python_and_numpy_rng_state() != python_and_numpy:
            raise UncapturableError("a layer draws from Python's random module or numpy.random")
        for place in draws.places:
            if place not in self._memory.rng_states:
                self._memory.rng_states[place] = self._capturer.new_rng_state()
        results = Results(without_graph(outputs), tuple(leaf.grad for leaf in leaves), moments, checksums)
        if second_run:
            if changed := guards.find_change():
                raise UncapturableError(f"{changed} changes whenever it runs")
            for name, buffer, version, value in buffers:
                # a recomputation would change it again
                if buffer._version != version or not torch.equal(checksum(buffer), value):
                    layer, _, changed = name.partition(".")
                    raise UncapturableError(f"layer {layer}: {changed} changes whenever it runs")
        return results

    def verify_replay(self, captured: CapturedMicroBatch, inputs: Tensors, seeds: Seeds, expected: Results) -> None:
        """Raises UncapturableError if a replay gives other bits than the layers."""
        for parameter in self.module.parameters():
            parameter.grad = None
        captured.replay_forward(inputs, seeds)
        if captured.backward is not None:
            captured.replay_backward(expected.outputs)
            if captured.weights is not None:
                captured.replay_weights()
        named = self.module.named_parameters()
        checksums = {name: checksum(weight.grad) for name, weight in named if weight.grad is not None}
        replayed = Results(captured.outputs, captured.input_gradients, captured.moments, checksums).by_name()
        for name, value in expected.by_name().items():
            if name not in replayed or not same_bits(replayed[name], value):
                raise UncapturableError(f"{name} has other bits when the layers are replayed")
            del replayed[name]
        if replayed:
            raise UncapturableError(f"{min(replayed)} is None unless the layers are replayed")


@dataclass
class _DrawingLayers:
    """Seeds each layer, and finds those that draw random numbers: their `places`."""

    device: torch.device
    module: nn.Module
    seeds: Seeds
    places: list[int] = field(default_factory=list)
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
            self.places.append(self._place)
        self._states = []


def _different_seeds(seeds: Seeds) -> Seeds:
    return lambda place: seeds(place) ^ 1


def _different_values(given: torch.Tensor) -> torch.Tensor:
    """Values that layers accept as well: of other samples or, unless they are indices, of other places."""
    if given.shape[:1] != (1,):
        return given.roll(1, 0)
    return given.roll(1) if given.is_floating_point() else given
