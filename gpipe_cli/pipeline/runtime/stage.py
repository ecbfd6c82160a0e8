"""A partition as it runs: its layers, its device, and what it saves of each micro-batch between forward and backward.

Paper section 2.3: after a forward a stage keeps only its input; before the backward it runs its layers again. Which
micro-batches are recomputed is not decided here: the executor reads it off the schedule.

What makes results independent of the cut (law 1), for each layer and not only for each stage:

* the default generator is seeded before each layer, so that dropout repeats in a recomputation and on any stage;
* the tensors between layers, and their gradients, always have the same strides and alignment, because kernels are
  chosen by them, and may sum in another order;
* a tensor that a layer returns twice becomes two tensors, because their gradients would otherwise be summed in an order
  that depends on whether a cut follows. The tensor that a `Stash` keeps and returns also becomes two: its gradient is
  the sum of exactly two gradients, which does not depend on their order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_cli.errors import InputError
from gpipe_cli.models.skips import Pop, Stash
from gpipe_cli.pipeline.runtime.boundary import (
    Boundary,
    OptionalTensors,
    Tensors,
    as_tuple,
    as_value,
    in_layout,
    without_graph,
)
from gpipe_cli.pipeline.runtime.captured_micro_batch import CapturedMicroBatch, CaptureKind
from gpipe_cli.pipeline.runtime.compilation import check_compiler, compile_layers, errors_name_layer
from gpipe_cli.pipeline.runtime.deferred_batch_norm import AllGather, BatchStatistics, defer_batch_norms, single_replica
from gpipe_cli.pipeline.runtime.deferred_weights import DeferredWeight, backward_inputs, backward_weights
from gpipe_cli.pipeline.runtime.frozen import set_training
from gpipe_cli.pipeline.runtime.graph_capture import GraphCapture
from gpipe_cli.pipeline.runtime.known_layers import StageLayer, layers_of
from gpipe_cli.pipeline.runtime.layer_buffers import ChangedBuffers, LayerBuffers
from gpipe_cli.pipeline.runtime.layer_call import call, shapes_of
from gpipe_cli.pipeline.runtime.module_state import restoring_state
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.pipeline.runtime.randomness import mix_in, step_seed
from gpipe_cli.pipeline.runtime.saved_activations import ActivationCounter
from gpipe_cli.pipeline.runtime.stage_graphs import StageCudaGraphs
from gpipe_cli.pipeline.runtime.static_memory import Seeds
from gpipe_cli.schedule.schedule import Action, Kind, Retain
from gpipe_cli.system.accelerator import generators, using_device
from gpipe_cli.system.cuda_graphs import CudaGraphCapturer

_NOTHING = nullcontext()


class Objective(Protocol):
    """What the last stage does with the model's outputs for a micro-batch."""

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        """The micro-batch's share of the mini-batch loss: a sum over its elements divided by the mini-batch's
        denominator."""

    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        """Called once per micro-batch, after its forward (never after a recomputation), for metrics."""


@dataclass
class _InFlight:
    """What is kept of a micro-batch between its forward and its backward."""

    inputs: Tensors
    # once there is an autograd graph: per output, the edge where its backward starts; None if it needs no gradient
    roots: tuple[GradientEdge | None, ...] | None = None
    # of replayed layers; `roots` then belong to the loss, which is not replayed
    captured: CapturedMicroBatch | None = None
    outputs: Tensors = ()  # replayed outputs, as leaves of the loss's autograd graph
    changed: ChangedBuffers = field(default_factory=list)  # buffers of layers, with which a recomputation begins


class Stage:
    """Stage `index` of the pipeline: consecutive layers of the model, beginning with layer number `first_layer`.

    `module` has these layers under their global names, already on `device`; its batch norms become deferred ones.
    `inputs` describes what other stages send (`routes.py`; empty on the first stage), `evaluation_inputs` what they
    send in evaluation, if that differs; `outputs` what this stage sends on in training, if it is known. If neither this
    stage nor any before it has something to train, it only runs forward: it keeps nothing, and R, B, I and W do
    nothing. Layers compute in `autocast_dtype` where autocast uses it; `compiled`: in training they run compiled by
    torch.compile.

    Raises InvalidSettingError if layers cannot be compiled here, and InputError for batch norms that cannot be
    deferred.
    """

    def __init__(
        self,
        index: int,
        module: nn.Sequential,
        *,
        first_layer: int,
        inputs: Boundary,
        evaluation_inputs: Boundary | None = None,
        outputs: Boundary = (),
        device: torch.device,
        run_seed: int,
        memory_format: torch.memory_format = torch.contiguous_format,
        autocast_dtype: torch.dtype | None = None,
        compiled: bool = False,
    ) -> None:
        self.index, self.module, self.device, self.compiled = index, module, device, compiled
        self.inputs, self._outputs = inputs, outputs
        self.layer_name = self.layer_shapes = ""  # the running layer, for the message if it fails
        in_evaluation = inputs if evaluation_inputs is None else evaluation_inputs
        received = [[tensor for tensor in boundary if not tensor.skip] for boundary in (in_evaluation, inputs)]
        self._in_tuple = [any(tensor.in_tuple for tensor in boundary) for boundary in received]
        # in evaluation and in training: for each input that belongs to a skip, the skip's name
        self._skips = [[tensor.skip for tensor in boundary if tensor.skip] for boundary in (in_evaluation, inputs)]
        self._first_layer = first_layer
        self._memory_format = memory_format
        self._autocast_dtype = autocast_dtype
        self.statistics = BatchStatistics()
        self._run_seed = run_seed
        self._step_seed = step_seed(run_seed, 0)
        self._first_micro_batch = 0
        self._objective: Objective | None = None
        self._saved: dict[int, _InFlight] = {}
        self._deferred: dict[int, list[DeferredWeight] | CapturedMicroBatch] = {}
        self.counter = ActivationCounter()
        self.cuda_graphs: StageCudaGraphs | None = None  # see `use_cuda_graphs`
        self._split: frozenset[int] = frozenset()
        self._layers = layers_of(module, compiled=compiled)
        self._generators = generators(device)
        self._in_layout = partial(in_layout, memory_format=memory_format)
        if compiled:
            check_compiler(device)
            compile_layers(module, self.statistics)
        else:
            defer_batch_norms(module, self.statistics)
        self._buffers = LayerBuffers(module, self.statistics.norms)
        self.frozen = [named for named in module.named_parameters() if not named[1].requires_grad]
        # without an autograd graph, recurrent layers run other kernels on CPUs, with other bits
        self._always_builds_graph = compiled or any(isinstance(inner, nn.RNNBase) for inner in module.modules())
        self.needs_backward = any(tensor.has_gradient for tensor in inputs) or any(
            parameter.requires_grad for parameter in module.parameters()
        )

    def set_training(self, training: bool) -> None:
        """Set training or evaluation mode; frozen modules stay in evaluation mode."""
        set_training(self.module, training)

    def set_autocast_dtype(self, dtype: torch.dtype | None) -> None:
        """From now on, layers compute in `dtype` where autocast uses it; None: in the types of their inputs."""
        if dtype is not self._autocast_dtype and self.cuda_graphs is not None:
            self.cuda_graphs.free_memory()
        self._autocast_dtype = dtype

    def use_cuda_graphs(self, capturer: CudaGraphCapturer) -> None:
        """From now on, replay actions as graphs where that gives the same bits."""
        make_capture = partial(GraphCapture, self.module, self.device, capturer, self.statistics, self._compute)
        self.cuda_graphs = StageCudaGraphs(make_capture, lambda: self.layer_name)

    def begin_step(
        self,
        step: int,
        objective: Objective | None,
        first_micro_batch: int = 0,
        actions: Sequence[Action] = (),
    ) -> None:
        """Called before the first action of a mini-batch. Seeds depend on `step`, which counts mini-batches over the
        whole run, and on a micro-batch's number over all replicas; this pipeline's numbers begin at
        `first_micro_batch`. `actions`: this stage's in the step."""
        self._saved.clear()  # of a step that failed
        self._deferred.clear()
        self.statistics.begin_step()
        self._step_seed = step_seed(self._run_seed, step)
        self._first_micro_batch = first_micro_batch
        self._objective = objective
        self._split = frozenset(action.micro_batch for action in actions if action.kind is Kind.I)
        self.counter.begin_step(self.module)
        if self.cuda_graphs is not None:
            self.cuda_graphs.begin_step()

    def forward(self, micro_batch: int, inputs: Tensors, retain: Retain) -> Tensors:
        """F: run the layers, and return the outputs for the next stage. `retain`: what to keep for the backward."""
        retain = retain if self.needs_backward else Retain.NOTHING
        captured = self._try_replay(micro_batch, inputs, retain)
        changed: ChangedBuffers = []
        if captured is not None:
            self.statistics.copy(captured.moments, micro_batch)
            outputs = self._finish_replayed_forward(micro_batch, captured, retain, observe=True)
        else:
            graph = retain is Retain.ACTIVATIONS
            with (
                self.statistics.writing_to(self.statistics.moments_of(micro_batch))
                if self.statistics.norms
                else _NOTHING,
                self._counting(micro_batch, retain, inputs),
                self._buffers.save_changed() if retain is Retain.INPUT else nullcontext(changed) as changed,
            ):
                leaves, outputs = self._compute(inputs, graph, self._make_seeder(micro_batch))
                if graph:
                    self._check_no_new_gradients(outputs)
                results = self._apply_objective(micro_batch, outputs, graph, observe=True)
            if graph:
                self._save(micro_batch, _InFlight(leaves, _roots(results)))
        if retain is Retain.INPUT:
            self._save(micro_batch, _InFlight(inputs, changed=changed))
        return outputs

    def recompute(self, micro_batch: int) -> None:
        """R: run the forward again from the kept inputs, now keeping every activation; receives nothing."""
        saved = self._saved[micro_batch]
        assert saved.roots is None, f"micro-batch {micro_batch} needs no recomputation"
        captured = self._try_replay(micro_batch, saved.inputs, Retain.ACTIVATIONS)
        if captured is not None:
            self._finish_replayed_forward(micro_batch, captured, Retain.ACTIVATIONS, observe=False)
            return
        with self._counting(micro_batch, Retain.ACTIVATIONS, saved.inputs), self._buffers.swap_in(saved.changed):
            leaves, outputs = self._compute(saved.inputs, True, self._make_seeder(micro_batch))
            self._check_no_new_gradients(outputs)
            results = self._apply_objective(micro_batch, outputs, True, observe=False)
        self._save(micro_batch, _InFlight(leaves, _roots(results)))

    def backward(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None], *, split: bool = False
    ) -> OptionalTensors:
        """B: return the gradients of the inputs; parameters accumulate theirs in `.grad`. If it is `split`, I: the
        gradients of weights that can wait are left to W; what they need is kept until then.

        `gradients`: of the outputs; the last stage ignores them, as its backward starts at the loss.
        """
        saved = self._saved.pop(micro_batch)
        assert saved.roots is not None, f"micro-batch {micro_batch} has not been recomputed"
        if saved.captured is None:
            return self._eager_backward(micro_batch, saved, gradients if self._objective is None else None, split=split)
        assert self.cuda_graphs is not None
        if self._objective is not None:
            gradients = _loss_gradients(saved)
        if self.cuda_graphs.backward_matches(saved.captured, gradients):
            return self._replay_backward(micro_batch, saved.captured, gradients)
        leaves, outputs = self._compute(_copies(saved.captured.inputs), True, self._make_seeder(micro_batch))
        return self._eager_backward(micro_batch, _InFlight(leaves, _roots(outputs)), gradients, split=split)

    def _eager_backward(
        self, micro_batch: int, saved: _InFlight, gradients: Sequence[torch.Tensor | None] | None, *, split: bool
    ) -> OptionalTensors:
        """Run the autograd graph backward from the outputs with these gradients; None: from the loss."""
        assert saved.roots is not None
        given = (None,) * len(saved.roots) if gradients is None else gradients
        pairs = [
            (root, gradient)
            for root, gradient in zip(saved.roots, given, strict=True)
            if root is not None and (gradient is not None or gradients is None)
        ]
        roots, root_gradients = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        if split:
            count_gradient = partial(self.counter.count_gradient, micro_batch)
            deferred = backward_inputs(roots, root_gradients, count_gradient) if roots else []
            self._deferred[micro_batch] = deferred
            self.counter.drop(micro_batch)
            self.counter.count(micro_batch, saved.inputs, (tensor for weight in deferred for tensor in weight.saved))
        else:
            if roots:
                torch.autograd.backward(roots, root_gradients)
            self.counter.drop(micro_batch)
        return tuple(tensor.grad for tensor in saved.inputs)

    def backward_weights(self, micro_batch: int) -> None:
        """W: compute the deferred gradients of weights, and accumulate them in `.grad`."""
        deferred = self._deferred.pop(micro_batch)
        if isinstance(deferred, CapturedMicroBatch):
            assert self.cuda_graphs is not None
            self.cuda_graphs.backward_weights(deferred)
        else:
            backward_weights(deferred)
        self.counter.drop(micro_batch)

    def _try_replay(self, micro_batch: int, inputs: Tensors, retain: Retain) -> CapturedMicroBatch | None:
        """Replay the forward, and return the micro-batch; None if the layers have to run."""
        if self.cuda_graphs is None:
            return None
        kind = CaptureKind.SPLIT if micro_batch in self._split else CaptureKind.WHOLE
        kind = kind if retain is Retain.ACTIVATIONS else CaptureKind.FORWARD
        return self.cuda_graphs.try_replay_forward(
            kind, inputs, self._layer_seeds(micro_batch), self._has_no_autograd_graph
        )

    def _has_no_autograd_graph(self) -> bool:
        """Whether no micro-batch in flight has an autograd graph over the layers, as replayed ones have none."""
        has_deferred = any(deferred and isinstance(deferred, list) for deferred in self._deferred.values())
        return not has_deferred and all(
            saved.roots is None or saved.captured is not None for saved in self._saved.values()
        )

    def _finish_replayed_forward(
        self, micro_batch: int, captured: CapturedMicroBatch, retain: Retain, *, observe: bool
    ) -> Tensors:
        """After a replay of the layers: compute the loss, and keep what a backward needs. Returns copies of the
        outputs, which the next replay overwrites."""
        graph = retain is Retain.ACTIVATIONS
        leaves = captured.outputs
        if graph:
            self.counter.count_replayed(micro_batch, captured.saved, captured.inputs)
            if self._objective is not None:
                pairs = zip(captured.outputs, captured.requires_grad, strict=True)
                leaves = tuple(output.detach().requires_grad_(requires_grad) for output, requires_grad in pairs)
        with torch.set_grad_enabled(graph), self.counter.counting_more(micro_batch):
            outputs = _copies(leaves)
            results = self._apply_objective(micro_batch, outputs, graph, observe=observe)
        if graph:
            roots = _roots(results) if self._objective is not None else (None,) * len(outputs)
            self._saved[micro_batch] = _InFlight(captured.inputs, roots, captured, leaves)
        return outputs

    def _replay_backward(
        self, micro_batch: int, captured: CapturedMicroBatch, gradients: Sequence[torch.Tensor | None]
    ) -> OptionalTensors:
        assert self.cuda_graphs is not None
        input_gradients = self.cuda_graphs.backward(captured, gradients)
        if captured.saved_for_w is not None:
            self.counter.count_replayed_weights(micro_batch, *captured.saved_for_w)
            self._deferred[micro_batch] = captured
        else:
            self.counter.drop(micro_batch)
        return input_gradients

    def compile(self, inputs: Boundary, samples: int, lengths: Sequence[int]) -> None:
        """Compile all layers for micro-batches of `samples`: each runs forward and backward once, on zeros.

        `inputs` describes what the first layer gets. Gradients and buffers stay as they are. Raises
        InvalidSettingError, which names the layer that does not compile.
        """
        # compiled code relies on what a first call leaves in attributes
        with using_device(self.device), restoring_state(self.module, keep_attributes=True):
            zeros = [torch.zeros(t.shape(samples, lengths), dtype=t.dtype, device=self.device) for t in inputs]
            given = tuple(
                in_layout(tensor, self._memory_format).requires_grad_(described.requires_grad)
                for tensor, described in zip(zeros, inputs, strict=True)
            )
            given, skips = self._split_off_skips(given)
            in_tuple = self._in_tuple[True]
            for layer in self._layers:
                with torch.enable_grad(), self._autocast():
                    outputs, in_tuple = self._call(layer, given, in_tuple, skips)
                roots = [tensor for tensor in outputs if tensor.grad_fn is not None]
                with errors_name_layer(layer.name):
                    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
                given = without_graph(outputs)
                skips = {skip: without_graph(tensors) for skip, tensors in skips.items()}

    def finish_step(self, all_gather: AllGather = single_replica) -> None:
        """Called after the last action, when nothing may be left saved: commits batch norms, over all replicas."""
        leftover = sorted({*self._saved, *self._deferred})
        assert not leftover, f"stage {self.index} still holds micro-batches {leftover}"
        if self.module.training and self.statistics.norms:
            self.statistics.commit(all_gather)
        self._objective = None

    def _save(self, micro_batch: int, saved: _InFlight) -> None:
        self._saved[micro_batch] = saved
        self.counter.count(micro_batch, saved.inputs, saved.inputs)

    def _counting(self, micro_batch: int, retain: Retain, inputs: Tensors) -> AbstractContextManager[None]:
        if retain is not Retain.ACTIVATIONS or not self.counter.on:
            return _NOTHING
        return self.counter.counting(micro_batch, inputs, self.statistics.flat_tensors)

    def _leaves(self, inputs: Tensors) -> Tensors:
        if not self.inputs:
            return inputs
        pairs = zip(inputs, self.inputs, strict=True)
        return tuple(tensor.detach().requires_grad_(described.requires_grad) for tensor, described in pairs)

    def _layer_seeds(self, micro_batch: int) -> Seeds:
        state = mix_in(self._step_seed, self._first_micro_batch + micro_batch)
        return lambda place: mix_in(state, self._first_layer + place)

    def _make_seeder(self, micro_batch: int) -> Callable[[int], None]:
        """A function that seeds the generators, to be called before each layer with its place in this stage."""
        if not self.module.training:
            return lambda place: None
        seeds = self._layer_seeds(micro_batch)
        before_loss = len(self._layers) - 1 if self._objective is not None else None  # a loss may also draw

        def seed(place: int) -> None:
            if self._layers[place].draws or place == before_loss:
                for generator in self._generators:
                    generator.manual_seed(seeds(place))

        return seed

    def _compute(self, inputs: Tensors, graph: bool, begin: Callable[[int], None]) -> tuple[Tensors, Tensors]:
        """Run all layers; returns the inputs, as leaves of the autograd graph if it is built, and the outputs. `begin`
        is called before each layer with its place. Without `graph`, compiled and recurrent layers still build it, so
        that they run the same code as in a recomputation; it is dropped layer by layer."""
        drop = self._always_builds_graph and self.module.training and not graph
        with _grad_mode(graph or drop), self._autocast():
            leaves = self._leaves(inputs) if graph or drop else inputs
            return leaves, self._run(leaves, begin, drop=drop)

    def _run(self, inputs: Tensors, begin: Callable[[int], None], *, drop: bool) -> Tensors:
        in_tuple = self._in_tuple[self.module.training]
        inputs, skips = self._split_off_skips(inputs)
        try:
            for place, layer in enumerate(self._layers):
                self.layer_name = layer.name
                begin(place)
                if layer.is_plain and len(inputs) == 1 and not (in_tuple or drop) and inputs[0].dim() != 4:
                    inputs = (layer.module(inputs[0]),)  # it needs none of what `_call` does
                    continue
                inputs, in_tuple = self._call(layer, inputs, in_tuple, skips)
                if drop:
                    inputs = without_graph(inputs)
                    skips = {skip: without_graph(tensors) for skip, tensors in skips.items()}
        except Exception:
            self.layer_shapes = shapes_of(inputs)
            raise
        self.layer_name = ""
        return (*inputs, *chain.from_iterable(skips.values()))

    def _split_off_skips(self, inputs: Tensors) -> tuple[Tensors, dict[str, Tensors]]:
        """The inputs of the first layer, and the skips that later layers pop, by name."""
        names = self._skips[self.module.training]
        split = len(inputs) - len(names)
        skips: dict[str, Tensors] = {}
        for name, tensor in zip(names, inputs[split:], strict=True):
            skips[name] = (*skips.get(name, ()), tensor)
        return inputs[:split], skips

    def _call(
        self, layer: StageLayer, inputs: Tensors, in_tuple: bool, skips: dict[str, Tensors]
    ) -> tuple[Tensors, bool]:
        """Run a layer: its outputs, in the same form whether or not a cut follows, and whether it returned a tuple. A
        `Stash` adds its input to `skips`, a `Pop` takes its skip from them."""
        module = layer.module
        if isinstance(module, Pop):
            inputs, in_tuple = (*inputs, *skips.pop(module.name)), True
        # evaluation keeps nothing, so a layer may change its input
        training = self.module.training
        returned = call(layer.name, module, inputs, in_tuple) if training else module(as_value(inputs, in_tuple))
        if stashed := isinstance(module, Stash):
            skips[module.name] = tuple(self._to_boundary_layout(tensor, new_view=True) for tensor in inputs)
        elif isinstance(returned, torch.Tensor):
            return (self._to_boundary_layout(returned, dense=layer.has_dense_gradient and returned.dim() != 4),), False
        converted: list[torch.Tensor] = []
        for tensor in as_tuple(returned):
            converted.append(
                self._to_boundary_layout(tensor, new_view=stashed or any(tensor is other for other in converted))
            )
        return tuple(converted), not isinstance(returned, torch.Tensor)

    def _to_boundary_layout(self, tensor: torch.Tensor, *, new_view: bool = False, dense: bool = False) -> torch.Tensor:
        """A tensor in the form that it has between layers; `new_view`: as a new view; `dense`: its gradient is known to
        also have that form."""
        tensor = self._in_layout(tensor)
        if tensor.requires_grad:
            if new_view:
                tensor = tensor.view_as(tensor)
            if not dense:
                tensor.register_hook(self._in_layout)
        return tensor

    def _autocast(self) -> AbstractContextManager[None]:
        return _NOTHING if self._autocast_dtype is None else autocast(self.device, self._autocast_dtype)

    def _check_no_new_gradients(self, outputs: Tensors) -> None:
        """Raises InputError for an output that requires a gradient but did not when the model was traced: this stage
        would not receive it."""
        for tensor, described in zip(outputs, self._outputs, strict=False):
            if tensor.requires_grad and not described.requires_grad:
                layer = f"Stash {described.skip}" if described.skip else f"layer {self._layers[-1].name}"
                raise InputError(
                    f"{layer} returns a tensor {tuple(tensor.shape)} that requires a gradient but did not when the "
                    f"model was traced: stage {self.index} would get no gradient; rebuild the pipeline when parameters "
                    "begin to be used or trained"
                )

    def _apply_objective(self, micro_batch: int, outputs: Tensors, graph: bool, *, observe: bool) -> Tensors:
        """The outputs; on the last stage the loss instead."""
        if self._objective is None:
            return outputs
        with _grad_mode(graph), self._autocast():
            loss = self._objective.loss(micro_batch, outputs)
            if observe:
                self._objective.observe(micro_batch, outputs, loss.detach())
        return (loss,)


def _grad_mode(enabled: bool) -> AbstractContextManager[object]:
    """`torch.set_grad_enabled`, which costs as much as a small layer, where it changes something."""
    return _NOTHING if torch.is_grad_enabled() is enabled else torch.set_grad_enabled(enabled)


def _loss_gradients(saved: _InFlight) -> OptionalTensors:
    """Run the loss backward: the gradients of replayed outputs."""
    if roots := [root for root in saved.roots or () if root is not None]:
        torch.autograd.backward(roots)
    return tuple(output.grad for output in saved.outputs)


def _copies(tensors: Tensors) -> Tensors:
    return tuple(tensor.clone() for tensor in tensors)


def _roots(outputs: Tensors) -> tuple[GradientEdge | None, ...]:
    """The edges where the backward of each output starts; the outputs themselves need not be kept for it."""
    return tuple(get_gradient_edge(output) if output.requires_grad else None for output in outputs)
