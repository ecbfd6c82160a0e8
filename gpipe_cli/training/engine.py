"""The stages of the pipeline in this process, with what training adds to them: optimizers and weight averages."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import nn

from gpipe_cli.assembly.build import COMPUTED_IN, MEMORY_FORMATS, build_model, real_model
from gpipe_cli.assembly.optimizer import build_optimizer, gradients_of
from gpipe_cli.assembly.weight_average import WeightAverage
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups
from gpipe_cli.models.amoebanet import set_progress
from gpipe_cli.pipeline.runtime.compilation import Compiled
from gpipe_cli.pipeline.runtime.executor import Executor, OnAction, ignore_action
from gpipe_cli.pipeline.runtime.frozen import freeze
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.routes import Boundaries, inputs_of
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.tied_weights import TiedWeights, share_memory, trained_parameters
from gpipe_cli.pipeline.runtime.transport import LocalTransport, Transport
from gpipe_cli.planner.pipeline_spec import PipelineSpec


@dataclass(frozen=True)
class WorkerProcess:
    """What a task is given by the worker process that runs it."""

    number: int
    connect: Callable[[], tuple[ControlGroup, ProcessGroups | None]]  # connects to the other processes of the run
    report: Callable[[object], None]  # sends a message, a frozen dataclass, to the parent
    on_action: OnAction = ignore_action  # called before every action of the pipeline
    before_failing: list[Callable[[], None]] = field(default_factory=list)  # called after the task has raised


@dataclass(frozen=True)
class Engine:
    """This process's part of a run: its stages (by index) with their optimizers and weight averages, the executor that
    runs schedules on them, and the control group of all processes."""

    config: TrainConfig
    spec: PipelineSpec
    model: nn.Sequential  # the whole model, on the meta device
    control: ControlGroup
    stages: dict[int, Stage]
    executor: Executor
    optimizers: dict[int, torch.optim.Optimizer | None]
    averages: dict[int, WeightAverage]
    # stage -> name -> parameter, in global order; a tied weight has its name in every stage, that of its first use
    parameters: dict[int, dict[str, nn.Parameter]]
    replicas: Replicas | None  # None: there is only one pipeline
    tied: TiedWeights

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.spec.partitions - 1 in self.stages

    @property
    def first_device(self) -> torch.device:
        return torch.device(self.spec.layout.devices[0])

    @property
    def last_device(self) -> torch.device:
        return torch.device(self.spec.layout.devices[-1])

    @property
    def memory_format(self) -> torch.memory_format:
        return MEMORY_FORMATS[self.spec.memory_format]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this process's parameters in global order, without parameters that have none."""
        return [gradient for k in self.stages for gradient in gradients_of(self.parameters[k].values())]

    def counted(self) -> list[torch.Tensor]:
        """Those of `gradients` that count: that of a tied weight only where it is used first."""
        return [gradient for k in self.stages for gradient in gradients_of(self.owned(k).values())]

    def owned(self, stage: int) -> dict[str, nn.Parameter]:
        """The parameters of a stage, without tied weights that an earlier stage has, too."""
        layers = self.spec.layer_names[stage]
        return {name: one for name, one in self.parameters[stage].items() if name.partition(".")[0] in layers}

    def set_progress(self, share: float) -> None:
        """Set the share of all training steps that is done, 0 to 1, in every stage (for scheduled drop-path)."""
        for stage in self.stages.values():
            set_progress(stage.module, share)

    def compile(self, sizes: Iterable[int]) -> Compiled:
        """Compile all layers of this process for micro-batches of `sizes` samples; returns what was compiled."""
        before = Compiled.so_far()
        for samples, (k, stage) in product(sizes, self.stages.items()):
            stage.compile(self.spec.stage_inputs(k), samples, self.spec.lengths)
        return Compiled.so_far() - before

    @contextmanager
    def evaluating(self, *, averages: bool) -> Iterator[None]:
        """Inside, all stages are in evaluation mode; with `averages`, they have the averaged weights."""
        with ExitStack() as stack:
            if averages:
                for average in self.averages.values():
                    stack.enter_context(average.applied())
            for stage in self.stages.values():
                stage.set_training(False)
                stack.callback(stage.set_training, True)
            yield

    def finish(self) -> None:
        """At the end of a run: wait until all tensors are sent and all processes are here, before one disconnects."""
        self.executor.settle()
        self.control.barrier()


def build_engine(
    config: TrainConfig,
    spec: PipelineSpec,
    control: ControlGroup,
    groups: ProcessGroups | None = None,
    *,
    on_action: OnAction = ignore_action,
    pretrained: bool = True,
) -> Engine:
    """Build the stages of this process, with their initial weights.

    `pretrained`: load the pretrained weights that the settings name; False if a checkpoint's weights replace them.
    Frozen parameters are in no optimizer; the optimizer of a stage without trainable parameters is None.
    """
    process = control.rank
    spec = spec.of_replica(spec.layout.replica_of(process))
    model, whole = build_model(config, pretrained=pretrained), real_model(config, pretrained=pretrained)
    freeze(model, spec.frozen)
    stages = {index: build_stage(config, spec, index, model, whole) for index in spec.layout.stages_of(process)}
    transport: Transport
    memory_format = MEMORY_FORMATS[spec.memory_format]
    boundaries = Boundaries(spec.training_boundaries, spec.evaluation_boundaries, memory_format)
    if groups is None or not spec.layout.distributed:
        transport = LocalTransport([torch.device(device) for device in spec.layout.devices], boundaries)
    else:
        transport = P2PTransport(
            process % spec.layout.of_pipeline,
            spec.layout.process_of_stage,
            groups.links,
            boundaries,
            torch.device(spec.layout.device_of(process)),
        )
    replicas = None
    if groups is not None and groups.replicas:
        replicas = Replicas(groups.replicas, spec.layout.replicas, groups.links.waits)
        replicas.connect(groups.links.connect_seconds)
    tied = tied_weights(spec, stages, process, groups)
    parameters = {k: trained_parameters(stage.module, spec.ties) for k, stage in stages.items()}
    return Engine(
        config,
        spec,
        model,
        control,
        stages,
        Executor(stages, spec.layout.device_of_stage, transport, on_action),
        optimizers={k: build_optimizer(config.optimizer, own) for k, own in parameters.items()},
        averages={k: WeightAverage(s.module, config.ema_decay) for k, s in stages.items()} if config.ema_decay else {},
        parameters=parameters,
        replicas=replicas,
        tied=tied,
    )


def tied_weights(
    spec: PipelineSpec, stages: Mapping[int, Stage], process: int, groups: ProcessGroups | None
) -> TiedWeights:
    """The tied weights of the stages of this process, connected to those of other processes."""
    tied = TiedWeights(
        spec.ties, spec.stages_of_ties, stages, process % spec.layout.of_pipeline, spec.layout.process_of_stage
    )
    if groups is not None and groups.tied:
        tied = replace(tied, groups=groups.tied, links=groups.links)
        tied.connect(torch.device(spec.layout.device_of(process)), groups.links.connect_seconds)
    return tied


def build_stage(
    config: TrainConfig,
    spec: PipelineSpec,
    index: int,
    model: nn.Sequential,
    whole: Callable[[], nn.Sequential] | None,
) -> Stage:
    """Stage `index`, in training mode; `model` is the whole model on the meta device, `whole` is from `real_model`."""
    device = torch.device(spec.layout.devices[index])
    stage = Stage(
        index,
        build_layers(config, spec, index, model, whole),
        first_layer=spec.first_layers[index],
        inputs=inputs_of(spec.training_boundaries, index),
        evaluation_inputs=inputs_of(spec.evaluation_boundaries, index),
        device=device,
        run_seed=config.seed,
        memory_format=MEMORY_FORMATS[spec.memory_format],
        computed_in=COMPUTED_IN[spec.precision],
        compiled=spec.compile,
    )
    stage.set_training(True)
    return stage


def build_layers(
    config: TrainConfig,
    spec: PipelineSpec,
    index: int,
    model: nn.Sequential,
    whole: Callable[[], nn.Sequential] | None,
) -> nn.Sequential:
    """The layers of stage `index` with their initial weights, as plain PyTorch has them; arguments as `build_stage`."""
    first, layers = spec.first_layers[index], len(spec.layer_names[index])
    device = torch.device(spec.layout.devices[index])
    module = materialize(model, first, layers, run_seed=config.seed, device=device, whole=whole, ties=spec.ties)
    freeze(module, spec.frozen)
    module.to(memory_format=MEMORY_FORMATS[spec.memory_format])
    share_memory(module, spec.ties)  # not earlier: a move separates parameters that share memory
    return module
