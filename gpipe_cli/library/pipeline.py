"""A pipeline in a program's own training loop: the engine that `gpipe train` runs, without settings files.

A program for torchgpipe or torch.distributed.pipelining changes a few lines: see `Pipeline`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from gpipe_cli.assembly.build import AUTOCAST_DTYPE
from gpipe_cli.assembly.optimizer import clip_gradients, gradient_norms
from gpipe_cli.config.schema import parse_config
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.control_group import global_norm
from gpipe_cli.distributed.torchrun_env import read_torchrun_env
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.library.setup import (
    Arguments,
    as_sequential,
    check_not_inference,
    choose_balance,
    connect,
    copy_modules,
    disable_modes,
    move,
    place_on_devices,
    to_meta,
)
from gpipe_cli.models.skips import find_skips
from gpipe_cli.pipeline.profile.layer_cost import LayerCost
from gpipe_cli.pipeline.profile.tracing import run_shapes, trace_layers
from gpipe_cli.pipeline.runtime.boundary import (
    Boundary,
    BoundaryTensor,
    Tensors,
    as_boundary,
    as_value,
    in_layout,
    split_all,
)
from gpipe_cli.pipeline.runtime.executor import ActionFailedError
from gpipe_cli.pipeline.runtime.frozen import keep_in_evaluation
from gpipe_cli.pipeline.runtime.layer_call import shapes_of
from gpipe_cli.pipeline.runtime.randomness import restoring_rng_state
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.saved_activations import storage_id
from gpipe_cli.pipeline.runtime.stage import Objective
from gpipe_cli.pipeline.runtime.tied_weights import find_ties
from gpipe_cli.planner.model_profile import TracedModel
from gpipe_cli.planner.pipeline_spec import PipelineCut
from gpipe_cli.planner.shared_layers import check_cut, find_read, find_shared
from gpipe_cli.schedule.named_schedules import forward_only, order
from gpipe_cli.schedule.partitioner import check_balance
from gpipe_cli.schedule.schedule import RecomputeMode, Schedule
from gpipe_cli.system.accelerator import wait_for_device
from gpipe_cli.system.uncompiled import skip_compiler
from gpipe_cli.training.pipeline_part import PipelinePart, build_part, build_stage
from gpipe_cli.units import count, plural

Values: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A tensor (N, ...), or a tuple of such tensors, of a mini-batch or a micro-batch of N samples."""
Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
Reduction: TypeAlias = Literal["mean", "sum"]
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of losses


class Pipeline(AbstractContextManager["Pipeline"]):
    """A sequence of layers, cut into K stages and trained as in the GPipe paper: each mini-batch is cut into M
    micro-batches, whose gradients are added up.

        layers = torch.nn.Sequential(...)
        pipeline = Pipeline(layers, partitions=2, micro_batches=8)
        optimizer = torch.optim.Adam(pipeline.parameters())
        for inputs, targets in batches:
            loss = pipeline.step(inputs, targets, torch.nn.functional.cross_entropy)
            optimizer.step(); optimizer.zero_grad()
        pipeline.close()  # or `with Pipeline(...) as pipeline:` around the loop

    Losses, gradients and weights are the same bits for every K, schedule with the same order of backwards, and mode of
    recomputation, also with dropout. Batch norm normalizes each micro-batch; its running statistics are the
    mini-batch's, and a norm that a forward applies twice is refused. Other buffers that layers change when they run are
    changed once by each micro-batch, in their order; what they keep elsewhere, as in attributes, is changed again by a
    recomputation.

    The layers are traced once for each shape of the inputs. Where a step is not as traced (a tensor between processes
    has another shape or type, or a tensor requires a gradient that would not be returned), it ends with an InputError
    that names the layer. Inside torch.autocast, layers and the loss compute in its type, and gradients in float32.

    Without torchrun, all stages are in this process, and compute on the CPU or on several GPUs. Under torchrun, every
    process runs the same program and has K / processes of the stages, whose layers alone keep their values. The
    processes then have to make the same calls in the same order; gloo connects them, and NCCL their GPUs.
    """

    def __init__(
        self,
        layers: nn.Sequential | Iterable[nn.Module],
        example: Values | None = None,
        *,
        partitions: int,
        micro_batches: int,
        schedule: str = "gpipe",
        recompute: RecomputeMode = "except_last",
        balance: Sequence[int] | None = None,
        devices: Sequence[str | torch.device] | None = None,
        seed: int = 0,
        graphs: bool = True,
        precision: Literal["float32", "bfloat16"] = "float32",
        compile: bool = False,
        replicas: int = 1,
    ) -> None:
        """Cut the layers into stages, and move these to their devices.

        Args:
            layers: an nn.Sequential, or modules in order, with their values. Each maps a tensor, or a tuple of them, to
                another, and does not change its input in place. The pipeline trains these very parameters; hooks and
                modes of the modules that are set later have no effect on it: modules that are in evaluation mode now
                stay so until `train` or `eval` is called. Under torchrun, layers of other processes are moved to the
                meta device, which frees their memory.
            example: inputs like a mini-batch's, of which only shapes and types matter. With it the cut is known,
                and the parameters are on their devices, before the optimizer is made; without it from the first step
                on. Under torchrun, it or `balance` is required.
            partitions: K, at most as many as layers.
            micro_batches: M. A mini-batch need not be a multiple of it.
            schedule: gpipe, the paper's; 1f1b, zero_bubble, interleaved, for two stages or more on each device, and
                zbv, v_half or v_min, for two.
            recompute: which micro-batches are recomputed before their backward: always, except_last (all but those
                whose backward follows immediately), never.
            balance: the number of layers of each partition; None: chosen so that the slowest partition is as fast as
                possible, by what the layers cost according to their shapes and the device's data sheet.
            devices: such as ["cuda:0", "cuda:1"], over which the stages are distributed; None: all GPUs, else the CPU.
                Under torchrun: the device of this process; None: its GPU, else the CPU.
            seed: for dropout and whatever else layers draw. The program's own generators are left as they are.
            graphs: on GPUs, replay the kernels of each stage as CUDA graphs where that gives the same bits, from the
                second step with micro-batches of the same shapes on. `.grad` is then the same memory in every step,
                without replicas. While they are captured, `.item()` and other waits raise, also in other threads.
            precision: of products and convolutions: bfloat16 by autocast, with weights and gradients in float32.
            compile: compile each layer by torch.compile, for each size of micro-batches, before the first step with it.
                Not for schedules that cut backwards in two: zero_bubble, zbv, v_half and v_min.
            replicas: R pipelines of equal layers, under torchrun: process p of pipeline r has rank r P + p. Each is
                given its own samples of a mini-batch, and their gradients are summed, as in DistributedDataParallel.

        Raises InputError, which names the argument, for what cannot be cut or placed, and ConnectionError or
        TimeoutError if other processes do not come.
        """
        check_not_inference("Pipeline")
        torchrun = read_torchrun_env()
        devices = [devices] if isinstance(devices, str) else devices
        given = {"partitions": partitions, "micro_batches": micro_batches, "schedule": schedule, "recompute": recompute,
                 "balance": None if balance is None else list(balance), "seed": seed, "graphs": graphs,
                 "devices": None if devices is None else [*map(str, devices)], "precision": precision,
                 "compile": compile, "replicas": replicas,
                 "executor": "in_process" if torchrun is None else "distributed"}  # fmt: skip
        self._arguments = parse_config(Arguments, given)
        whole = as_sequential(layers)
        layout = place_on_devices(self._arguments, torchrun)
        self._layout = layout.for_rank(0 if torchrun is None else torchrun.rank)
        if self._layout.torchrun is not None and example is None and balance is None:
            why = "under torchrun each process must know its layers before the first step"
            raise InvalidSettingError("example", None, f"{why}; give the inputs of a mini-batch, or balance")
        self.training = True
        self._closed = False
        self.steps = 0
        """The mini-batches trained so far, from which dropout is seeded: a training that is continued sets it."""
        find_skips(whole)
        self._shared = find_shared(whole, "layers")
        self._model = copy_modules(whole, to_meta)  # the whole model on the meta device
        self._module = copy_modules(whole, lambda tensor: tensor)  # the layers of this process
        modes = whole.named_modules(remove_duplicate=False)
        self._keep_in_evaluation(name for name, module in modes if name and not module.training)
        self._autocast_dtype = AUTOCAST_DTYPE[precision]  # the type of products, also where the program sets autocast
        self._traced: dict[tuple[Boundary, torch.dtype | None, frozenset[str]], TracedModel] = {}
        self._spec: PipelineCut | None = None
        self._part: PipelinePart | None = None
        self._shapes: dict[int, Boundary] = {}  # of the inputs of all replicas so far, by what stands for them
        self._takes_single_samples = False  # set once a run has shown that every layer does
        # shapes of inputs, sizes, `_autocast_dtype` and `_in_evaluation`
        self._compiled = set[tuple[Boundary, int, torch.dtype | None, frozenset[str]]]()
        self._replicas_agree = False  # set once the buffers of replicas have been compared after a step
        inputs = None if example is None else _check_values("example", example)
        traced = None if inputs is None else self._trace(as_boundary(inputs))
        self._control, self._groups = connect(self._layout)
        if inputs is not None or balance is not None:
            self._cut(traced, len(inputs[0]) if inputs else 0)
        local_layers = dict(self._module.named_children())
        for name, layer in whole.named_children():
            if name not in local_layers:
                layer.to_empty(device="meta")

    @skip_compiler
    def step(
        self, inputs: Values | None, targets: Values | None, loss: Loss, *, reduction: Reduction = "mean"
    ) -> torch.Tensor:
        """Run a mini-batch forward and backward; the gradients are added to `.grad` of the parameters. Hooks of
        `register_post_accumulate_grad_hook` are called once, at its end.

        Args:
            inputs: (N, ...), or a tuple of such tensors, with which the first layer is called.
            targets: (N, ...), or a tuple of such tensors.
            loss: called with what the last layer returns for a micro-batch, and the targets of its samples; returns a
                scalar.
            reduction: what `loss` returns: the mean over the samples, so that micro-batches are weighted by their
                samples; or a sum, which is just added up. For a mean over something else, such as the tokens of padded
                sentences, divide the sum by their number in the mini-batch.

        Returns the loss of the mini-batch, without graph: on the device of the last stage; under torchrun in every
        process, on the CPU. There `inputs` may be None except in the process of the first stage (process 0), `targets`
        except in the last stage's (the last process; in a V also process 0). Each of several replicas is given its own
        samples, and the mean and the loss are over all replicas' samples.

        Raises InputError for arguments that cannot be used, ActionFailedError if a layer or the loss fails, and
        PeerLostError if another process is lost.
        """
        self._require(training=True)
        check_not_inference("step")
        if reduction not in ("mean", "sum"):
            raise InvalidSettingError("reduction", reduction, "must be one of mean, sum; for example reduction=mean")
        if inputs is not None and any(tensor.requires_grad for tensor in _check_values("inputs", inputs)):
            raise InputError("inputs: require a gradient, which a pipeline does not compute; give inputs.detach()")
        devices = map(torch.device, self._layout.devices_of(self._control.rank))
        with restoring_rng_state(devices), self._take_over_autocast():
            part, traced, mini_batch = self._begin(inputs)
            part.set_autocast_dtype(self._autocast_dtype)
            sizes = mini_batch.sizes
            if sizes[-1] == 1:
                self._check_single_samples(sum(sizes))
            if self._arguments.compile:
                self._compile(part, mini_batch)
            objective = None
            if part.has_last:
                of_samples = _to_device("targets", targets, self._layout.devices[-1])
                if len(of_samples[0]) != sum(sizes):
                    why = f"there are {plural(sum(sizes), 'sample')} in inputs; give a target for each"
                    raise InvalidSettingError("targets", tuple(of_samples[0].shape), why)
                pieces = [
                    as_value(piece, not isinstance(targets, torch.Tensor)) for piece in split_all(of_samples, sizes)
                ]
                shares = [size / mini_batch.samples if reduction == "mean" else 1.0 for size in sizes]
                objective = _MiniBatchLoss(loss, pieces, shares, _in_tuple(traced.costs))
            self._run(part, part.spec.schedule(len(sizes)), mini_batch, objective)
        self.steps += 1
        return self._sum_of_last(None if objective is None else objective.total())

    @skip_compiler
    @torch.inference_mode(mode=False)  # as later steps train what the first call builds
    def forward(self, inputs: Values | None) -> Any:
        """What the last layer returns for a mini-batch (N, ...), in evaluation mode and without a graph: a tensor (N,
        ...), or a tuple of them, on the device of the last stage. Under torchrun it is None in all processes except the
        last stage's, and `inputs` may be None in all but the first. `pipeline(inputs)` is the same."""
        self._require(training=False)
        with self._take_over_autocast():
            part, traced, mini_batch = self._begin(inputs)
            part.set_autocast_dtype(self._autocast_dtype)
            objective = _Outputs() if part.has_last else None
            self._run(part, forward_only(self._arguments.partitions, len(mini_batch.sizes)), mini_batch, objective)
        self._control.barrier()  # a process that ends, or drops the pipeline, would take along what it still sends
        if objective is None:
            return None
        described = [tensor for tensor in traced.evaluation[-1].outputs if not tensor.skip]
        whole = tuple(
            torch.cat(pieces, _sample_dimension(tensor))
            for tensor, *pieces in zip(described, *objective.outputs, strict=True)
        )
        return as_value(whole, _in_tuple(traced.evaluation))

    __call__ = forward

    def train(self, mode: bool = True, *, in_evaluation: Iterable[str] = ()) -> "Pipeline":
        """Set training mode, as `nn.Module.train`, or with False evaluation mode. Modules that `in_evaluation` names
        stay in evaluation mode, with those below them:

            pipeline.train(in_evaluation=["1", "3.norm"])  # as layers.train(); layers[1].eval(); layers[3].norm.eval()

        Raises InputError for a name that is not in `named_modules()` of the layers."""
        names = {name for name, _ in self._model.named_modules(remove_duplicate=False)}
        kept = list(in_evaluation)
        for name in kept:
            if name not in names:
                raise InvalidSettingError("in_evaluation", name, "is not a module; give names of named_modules()")
        below = tuple(f"{name}." for name in kept)
        self._keep_in_evaluation(name for name in names if name in kept or name.startswith(below))
        self._takes_single_samples = False
        self.training = mode
        if self._part is not None:
            for stage in self._part.stages.values():
                stage.set_training(mode)
        return self

    def eval(self) -> "Pipeline":
        """Set evaluation mode."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the layers in this process, in order."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the layers in this process, under their names in the whole sequence. A weight that several
        layers have is a single parameter on each device that needs it, and has the same gradient on all of them."""
        storages = set[int]()
        for name, parameter in self._module.named_parameters():
            if (storage := storage_id(parameter)) not in storages:
                storages.add(storage)
                yield name, parameter

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm, over the parameters of all stages, is at most `max_norm`, as
        `torch.nn.utils.clip_grad_norm_` for a whole model; returns the norm before, float64 (). Under torchrun all
        processes must call it together."""
        self._require_open("clip_grad_norm_")
        gradients = {name: parameter.grad for name, parameter in self.named_parameters() if parameter.grad is not None}
        local_norms = gradient_norms(list(gradients.values())).cpu()
        # the whole model has a tied weight under a single name, so that its other copies do not count
        norm_of_name = {
            name: norm
            for part in self._control.collect(dict(zip(gradients, local_norms, strict=True)))
            for name, norm in part.items()
        }
        in_order = [norm_of_name[name] for name, _ in self._model.named_parameters() if name in norm_of_name]
        all_norms = torch.stack(in_order) if in_order else local_norms
        clip_gradients(list(gradients.values()), all_norms, max_norm)
        return global_norm(all_norms)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of all parameters and buffers, on the CPU, under the names that the whole sequence gives them.

        Under torchrun all processes must call it together, and get the same.
        """
        self._require_open("state_dict")
        local_layers = dict(self._module.named_children())
        state: dict[str, torch.Tensor] = {}
        for name, _ in self._model.named_children():  # layer by layer, so that messages are no larger than a layer
            tensors = local_layers[name].state_dict(prefix=f"{name}.") if name in local_layers else {}
            for part in self._control.collect({key: value.to("cpu", copy=True) for key, value in tensors.items()}):
                state |= part
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load parameters and buffers from what `state_dict` of the pipeline or of the sequence of layers returned.
        Under torchrun every process gives all of them, and loads its own. Raises InputError if they do not fit."""
        expected = self._model.state_dict()
        for name in (*expected, *state):
            if name not in state or name not in expected:
                what = "is missing" if name not in state else "is unknown"
                raise InputError(f"state: {name} {what}; give what state_dict of the same layers returned")
            if state[name].shape != expected[name].shape:
                shapes = f"has the shape {tuple(state[name].shape)}, and the layers {tuple(expected[name].shape)}"
                raise InputError(f"state: {name} {shapes}; give what state_dict of the same layers returned")
        local_layers = dict(self._module.named_children())
        self._module.load_state_dict(
            {name: value for name, value in state.items() if name.partition(".")[0] in local_layers}
        )

    def close(self) -> None:
        """Free all that the pipeline holds except its layers: receive buffers, CUDA graphs and, under torchrun, process
        groups with their threads. All processes must call it together. The layers keep their values."""
        if self._closed:
            return
        if self._part is not None:
            self._part.executor.drain_sends()
            for stage in self._part.stages.values():
                wait_for_device(stage.device)
        self._control.close()
        if self._groups is not None:
            self._groups.close()
        self._part = self._groups = None
        self._closed = True

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:  # else other processes may be lost, or run on
            self.close()

    def __repr__(self) -> str:
        """A line for the whole pipeline, and a line for each stage."""
        arguments = self._arguments
        layers = dict(self._model.named_children())
        sizes = f"K = {plural(arguments.partitions, 'partition')}, M = {plural(arguments.micro_batches, 'micro-batch')}"
        how = f"{sizes}, schedule {arguments.schedule}, recompute {arguments.recompute}"
        whole = f"Pipeline of {plural(len(layers), 'layer')}, {_parameters(self._model)}: {how}"
        if self._spec is None:
            return f"{whole}; the first step cuts it"
        lines = [whole]
        for k, names in enumerate(self._spec.layer_names):
            where = (
                self._layout.devices[k] if k in self._local_stages else f"in process {self._layout.rank_of_stage[k]}"
            )
            ends = " ... ".join(dict.fromkeys((names[0], names[-1])))
            parameters = _parameters(layers[name] for name in names)
            lines.append(f"  stage {k}  {where}  {plural(len(names), 'layer')}: {ends}  {parameters}")
        return "\n".join(lines)

    def _keep_in_evaluation(self, names: Iterable[str]) -> None:
        self._in_evaluation = frozenset(names)
        keep_in_evaluation(self._model, self._in_evaluation)
        keep_in_evaluation(self._module, self._in_evaluation)

    @property
    def _local_stages(self) -> tuple[int, ...]:
        return self._layout.stages_of(self._control.rank)

    def _trace(self, inputs: Boundary) -> TracedModel:
        """Costs and boundaries for `inputs`, traced once for equal shapes. Raises InputError if layers do not fit."""
        key = inputs, self._autocast_dtype, self._in_evaluation
        if key not in self._traced:
            # within a process, the types between layers need not be known
            autocast_dtype = (
                self._autocast_dtype if self._layout.distributed else AUTOCAST_DTYPE[self._arguments.precision]
            )
            trace = partial(trace_layers, self._model, inputs, autocast_dtype=autocast_dtype, device=self._device_type)
            with disable_modes():
                costs, evaluation = (trace(training=mode) for mode in (True, False))
            shared = (*self._shared, *find_read(costs, evaluation))
            self._traced[key] = TracedModel(costs, evaluation, shared)
        return self._traced[key]

    def _cut(self, traced: TracedModel | None, samples: int) -> PipelineCut:
        """Choose the stages, by the costs for mini-batches of `samples` if no balance is given, and keep this process's
        layers. The boundaries between stages are left open."""
        arguments = self._arguments
        layout = self._layout
        balance = arguments.balance
        if balance is None:
            assert traced is not None
            samples_of_each = samples / min(samples, arguments.micro_batches)
            chosen = choose_balance(traced, layout, self._control.rank, samples_of_each)
            balance = self._control.collect(chosen)[0]  # processes may have devices of different kinds
        check_balance(balance, len(self._model), arguments.partitions, "balance")
        check_cut(self._shared if traced is None else traced.shared, balance, "balance")
        names = iter(dict(self._model.named_children()))
        spec = PipelineCut(
            layer_names=tuple(tuple(islice(names, size)) for size in balance),
            ties=find_ties(self._model),
            training_boundaries=(),
            evaluation_boundaries=(),
            order=order(
                arguments.schedule, arguments.partitions, arguments.micro_batches, 1 + max(layout.row_of_stage)
            ),
            recompute=arguments.recompute,
            layout=layout,
            precision=arguments.precision,
            compile=arguments.compile,
            graphs=arguments.graphs,
        )
        devices = {name: torch.device(layout.devices[k]) for k in self._local_stages for name in spec.layer_names[k]}
        self._module = _select_layers(self._module, devices)
        move(self._module, devices, spec.ties)
        self._spec = spec
        return spec

    def _begin(self, inputs: Values | None) -> tuple[PipelinePart, TracedModel, "_MiniBatch"]:
        """This process's part, made or fitted to the shapes of these inputs; the costs of layers for them; and the
        inputs of this pipeline on its first device."""
        tensors = _to_device("inputs", inputs, self._layout.devices[0]) if 0 in self._local_stages else None
        of_replicas = self._shapes_and_samples(tensors)
        sizes = [micro_batch_sizes(samples, self._arguments.micro_batches) for _, samples in of_replicas]
        replica = self._layout.replica
        shapes, samples = of_replicas[replica]
        mini_batch = _MiniBatch(tensors, shapes, sizes[replica], sum(map(len, sizes[:replica])), sum(map(sum, sizes)))
        knows_shapes = self._groups is not None or self._arguments.compile
        if self._part is not None and not knows_shapes:  # what is not sent needs no trace
            return self._part, next(iter(self._traced.values())), mini_batch
        traced = self._trace(shapes)
        spec = self._spec or self._cut(traced, samples)
        balance = [len(names) for names in spec.layer_names]
        in_training, in_evaluation = traced.boundaries(balance)
        if self._part is None:
            check_cut(traced.shared, balance, "balance")
            self._part = self._build(
                replace(spec, training_boundaries=in_training, evaluation_boundaries=in_evaluation)
            )
            for stage in self._part.stages.values():
                stage.set_training(self.training)
            if self._part.replicas is not None:
                parameters = dict(self._module.named_parameters())
                _check_same_in_replicas(self._part.replicas, parameters, "build all replicas from the same seed")
        self._part.boundaries.change(in_training, in_evaluation)
        return self._part, traced, mini_batch

    def _shapes_and_samples(self, tensors: Tensors | None) -> list[tuple[Boundary, int]]:
        """The shapes of the inputs of each replica, and their samples, in every process; `tensors` are this process's
        inputs. Shapes are sent once; from then on numbers stand for them."""
        shapes = None if tensors is None else as_boundary(tensors)
        samples = 0 if tensors is None else len(tensors[0])
        if self._control.size == 1:
            assert shapes is not None
            return [(shapes, samples)]
        number = 0 if shapes is None else int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:6], "big")
        vectors = self._control.gather(torch.tensor([number, samples], dtype=torch.float64))()
        every = torch.stack(vectors).long().tolist()
        of_replicas = every[:: self._layout.processes_per_pipeline]
        if not self._shapes.keys() >= {number for number, _ in of_replicas}:
            numbered = zip(every, self._control.collect(shapes), strict=True)
            self._shapes |= {number: shapes for (number, _), shapes in numbered if shapes is not None}
        return [(self._shapes[number], samples) for number, samples in of_replicas]

    @property
    def _device_type(self) -> str:
        return torch.device(self._layout.devices[0]).type

    @contextmanager
    def _take_over_autocast(self) -> Iterator[None]:
        """While active, the program's autocast is off; layers and the loss compute in its type, with a cast for each
        layer, so that results do not depend on the cut (`pipeline/runtime/precision.py`)."""
        kind = self._device_type
        enabled = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if enabled else None
        self._autocast_dtype = AUTOCAST_DTYPE[self._arguments.precision] or dtype
        with torch.autocast(kind, enabled=False) if enabled else nullcontext():
            yield

    def _compile(self, part: PipelinePart, mini_batch: "_MiniBatch") -> None:
        how = self._autocast_dtype, self._in_evaluation
        needed = {(mini_batch.shapes, size, *how) for size in mini_batch.sizes}
        part.compile(mini_batch.shapes, sorted(size for _, size, *_ in needed - self._compiled))
        self._compiled |= needed

    def _build(self, spec: PipelineCut) -> PipelinePart:
        rank = self._control.rank
        if self._groups is not None:
            device = torch.device(self._layout.device_of(rank))
            of_stage, ties = self._layout.rank_of_stage, spec.stages_of_ties
            self._groups = self._groups.for_cut(rank, of_stage, device, ties, spec.skips)
        stages = {
            k: build_stage(spec, k, _select_layers(self._module, spec.layer_names[k]), self._arguments.seed)
            for k in self._local_stages
        }
        return build_part(spec, stages, rank, self._groups)

    def _check_single_samples(self, samples: int) -> None:
        """Raises InputError if a layer cannot be trained on a single sample, as batch norm with 1 value per channel."""
        if self._takes_single_samples:
            return
        try:
            with disable_modes():
                run_shapes(self._model, next(iter(self._traced))[0])
        except InputError as error:
            limit = samples // 2
            remedy = f"use micro_batches={limit} or fewer, or larger mini-batches" if limit else "use larger ones"
            why = f"a mini-batch of {plural(samples, 'sample')} has a micro-batch of one, and {error}; {remedy}"
            raise InvalidSettingError("micro_batches", self._arguments.micro_batches, why) from error
        self._takes_single_samples = True

    def _run(
        self, part: PipelinePart, schedule: Schedule, mini_batch: "_MiniBatch", objective: Objective | None
    ) -> None:
        if schedule.trains:
            part.check_still_frozen()
        replicas = part.replicas if schedule.trains else None
        summed: list[nn.Parameter] = []  # whose gradients are replaced by sums, instead of being added to
        if schedule.trains:
            summed = list(dict.fromkeys((*part.tied.parameters, *(() if replicas is None else self.parameters()))))
        # a replayed graph adds to the memory that the last step's gradient has
        earlier_gradients = [
            parameter.grad.clone() if part.uses_cuda_graphs and parameter.grad is not None else parameter.grad
            for parameter in summed
        ]
        for parameter in summed:
            parameter.grad = None
        try:
            timings = part.executor.run(
                schedule, self.steps, mini_batch.sizes, mini_batch.inputs, objective,
                first_micro_batch=mini_batch.first_micro_batch, replicas=replicas,
            )  # fmt: skip
        except BaseException as error:
            for parameter, earlier in zip(summed, earlier_gradients, strict=True):
                parameter.grad = earlier
            if isinstance(error, ActionFailedError) and isinstance(error.__cause__, InputError):
                raise error.__cause__ from None
            raise
        if not schedule.trains:
            return
        part.sum_gradients(timings)
        if replicas is not None and not self._replicas_agree:
            self._replicas_agree = True
            remedy = "a layer changes it by its replica's samples; use replicas=1"
            _check_same_in_replicas(replicas, dict(self._module.named_buffers()), remedy)
        for parameter, earlier in zip(summed, earlier_gradients, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        part.executor.call_gradient_hooks()

    def _sum_of_last(self, value: torch.Tensor | None) -> torch.Tensor:
        """The sum over replicas of the values that the processes of the last stage have, in every process."""
        if self._control.size > 1:
            number = [0.0, 0.0] if value is None else [value.item(), _TYPES.index(value.dtype)]
            every = self._control.gather(torch.tensor(number, dtype=torch.float64))()
            of_last = every[self._layout.rank_of_stage[-1] :: self._layout.processes_per_pipeline]
            value = sum(loss.to(_TYPES[int(dtype)]) for loss, dtype in of_last)
        assert value is not None
        return value

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise InputError(f"{call}: the pipeline is closed; call it before close(), or make another pipeline")

    def _require(self, *, training: bool) -> None:
        self._require_open("step" if training else "forward")
        if self.training != training:
            call, other = ("step", "train") if training else ("forward", "eval")
            mode = "training" if self.training else "evaluation"
            raise InputError(f"{call}: the pipeline is in {mode} mode; call pipeline.{other}() before")


class _MiniBatch(NamedTuple):
    """What one pipeline is given of a mini-batch."""

    inputs: Tensors | None  # only in the process of the first stage
    shapes: Boundary
    sizes: tuple[int, ...]  # samples of each micro-batch
    first_micro_batch: int  # its number among all replicas' micro-batches
    samples: int  # of all replicas


@dataclass
class _MiniBatchLoss:
    """The user's loss of each micro-batch, times its share."""

    function: Loss
    targets: Sequence[Any]
    shares: Sequence[float]
    in_tuple: bool
    losses: list[torch.Tensor] = field(default_factory=list)

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        value = self.function(as_value(outputs, self.in_tuple), self.targets[micro_batch])
        if not isinstance(value, torch.Tensor) or value.dim():
            returned = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputError(f"loss: returns {returned}; return a scalar tensor, such as the mean over the samples")
        share = self.shares[micro_batch]
        return value if share == 1.0 else value * share

    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        self.losses.append(loss.clone())

    def total(self) -> torch.Tensor:
        return torch.stack(self.losses).sum()


class _Outputs:
    """Keeps what the last layer returns."""

    def __init__(self) -> None:
        self.outputs: list[Tensors] = []

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        return outputs[0]

    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        self.outputs.append(outputs)


def _check_values(name: str, values: Values | None) -> Tensors:
    """The tensors of a mini-batch. Raises InputError unless all have the same number of samples, at least 1."""
    tensors = (values,) if isinstance(values, torch.Tensor) else tuple(() if values is None else values)
    if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) for tensor in tensors):
        raise InputError(f"{name}: is neither a tensor (N, ...) of N samples nor a tuple of them; give a mini-batch")
    if len({len(tensor) for tensor in tensors}) > 1:
        shapes = shapes_of(tensors)
        raise InputError(f"{name}: tensors {shapes} have different numbers of samples; the first dimension is N")
    return tensors


def _to_device(name: str, values: Values | None, device: str) -> Tensors:
    """The tensors of a mini-batch on a device. Raises InputError if they cannot be a mini-batch."""
    moved = (tensor.detach().to(device, non_blocking=True) for tensor in _check_values(name, values))
    return tuple(in_layout(tensor, torch.contiguous_format) for tensor in moved)


def _sample_dimension(tensor: BoundaryTensor) -> int:
    """The dimension along which micro-batches of what the last layer returns are joined."""
    growing = [dimension for dimension, slope in enumerate(tensor.per_sample) if slope]
    if len(growing) != 1:
        raise InputError(
            f"the last layer returns a tensor {tensor.shape(1)} for one sample and {tensor.shape(2)} for two, which "
            "cannot be joined over micro-batches; return a tensor in which a single dimension grows with the samples"
        )
    return growing[0]


def _check_same_in_replicas(replicas: Replicas, tensors: Mapping[str, torch.Tensor], remedy: str) -> None:
    """Raises InputError for a tensor of this process that has other values in another replica."""
    floats = {name: tensor.detach().float() for name, tensor in tensors.items()}
    if not floats:
        return
    norms = torch.stack(list(replicas.gather(gradient_norms(list(floats.values()))))).nan_to_num()
    for name, norms_of_tensor in zip(floats, norms.unbind(1), strict=True):
        if norms_of_tensor.ne(norms_of_tensor[0]).any():
            raise InputError(f"replicas={replicas.size}: {name} has other values in another replica; {remedy}")


def _select_layers(layers: nn.Sequential, names: Iterable[str]) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, layers.get_submodule(name)) for name in names))


def _in_tuple(costs: Sequence[LayerCost]) -> bool:
    return any(tensor.in_tuple for tensor in costs[-1].outputs)


def _parameters(layers: Iterable[nn.Module]) -> str:
    sizes = {id(parameter): parameter.numel() for layer in layers for parameter in layer.parameters()}
    return f"{count(sum(sizes.values()))} parameters"
