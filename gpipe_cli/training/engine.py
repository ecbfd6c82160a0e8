"""The stages of the pipeline in this process, with what training adds to them: optimizers and weight averages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from gpipe_cli.assembly.build import MEMORY_FORMATS, build_model, full_model_builder
from gpipe_cli.assembly.optimizer import build_optimizer, gradients_of
from gpipe_cli.assembly.weight_average import WeightAverage
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups
from gpipe_cli.models.drop_path import set_progress
from gpipe_cli.pipeline.runtime.executor import OnAction, ignore_action
from gpipe_cli.pipeline.runtime.frozen import freeze
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.pipeline.runtime.tied_weights import share_memory, trained_parameters
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.training.pipeline_part import PipelinePart, build_part, build_stage


@dataclass(frozen=True)
class WorkerProcess:
    """The worker process that runs a task, as the task sees it."""

    rank: int
    connect: Callable[[], tuple[ControlGroup, ProcessGroups | None]]  # connects to the other processes of the run
    report: Callable[[object], None]  # sends a message, a frozen dataclass, to the parent
    on_action: OnAction = ignore_action  # called before every action of the pipeline
    flush_messages: Callable[[], None] = lambda: None  # in process 0: waits until the parent has handled all messages
    on_failure: list[Callable[[], None]] = field(default_factory=list)  # called after the task has raised


@dataclass(frozen=True)
class Engine(PipelinePart):
    """This process's part of a run: its part of the pipeline, the optimizers and weight averages of its stages, and the
    control group of all processes."""

    spec: PipelineSpec
    config: TrainConfig
    model: nn.Sequential  # the whole model, on the meta device
    control: ControlGroup
    optimizers: dict[int, torch.optim.Optimizer | None]
    averages: dict[int, WeightAverage]
    # stage -> name -> parameter, in global order; a tied weight has the name of its first use in every stage
    parameters: dict[int, dict[str, nn.Parameter]]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this process's parameters in global order, without parameters that have none."""
        return [gradient for k in self.stages for gradient in gradients_of(self.parameters[k].values())]

    def owned_parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """The parameters of a stage, without tied weights that an earlier stage also has."""
        layers, parameters = self.spec.layer_names[stage], self.parameters[stage]
        return {name: parameter for name, parameter in parameters.items() if name.partition(".")[0] in layers}

    def set_progress(self, fraction: float) -> None:
        """Set the fraction of all training steps that are done, 0 to 1, in every stage (for scheduled drop-path)."""
        for stage in self.stages.values():
            set_progress(stage.module, fraction)

    @contextmanager
    def evaluation_mode(self, *, averages: bool) -> Iterator[None]:
        """While active, all stages are in evaluation mode; with `averages`, they have the averaged weights."""
        with ExitStack() as stack:
            if averages:
                for average in self.averages.values():
                    stack.enter_context(average.use_averages())
            for stage in self.stages.values():
                stage.set_training(False)
                stack.callback(stage.set_training, True)
            yield

    def finish(self) -> None:
        """At the end of a run: wait until all tensors are sent, and for all processes, before any disconnects."""
        self.executor.drain_sends()
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
    spec = replace(spec, layout=spec.layout.for_rank(process))
    model, whole = build_model(config, pretrained=pretrained), full_model_builder(config, pretrained=pretrained)
    freeze(model, spec.frozen)
    stages = {
        index: build_stage(spec, index, build_layers(config, spec, index, model, whole), config.seed)
        for index in spec.layout.stages_of(process)
    }
    parameters = {k: trained_parameters(stage.module, spec.ties) for k, stage in stages.items()}
    return Engine(
        **vars(build_part(spec, stages, process, groups, on_action)),
        config=config,
        model=model,
        control=control,
        optimizers={
            k: build_optimizer(config.optimizer, stage_parameters) for k, stage_parameters in parameters.items()
        },
        averages={k: WeightAverage(s.module, config.ema_decay) for k, s in stages.items()} if config.ema_decay else {},
        parameters=parameters,
    )


def build_layers(
    config: TrainConfig,
    spec: PipelineSpec,
    index: int,
    model: nn.Sequential,
    whole: Callable[[], nn.Sequential] | None,
) -> nn.Sequential:
    """The layers of stage `index` with their initial weights, as plain PyTorch has them; `model` is the whole model on
    the meta device, `whole` is from `full_model_builder`."""
    first, layers = spec.first_layers[index], len(spec.layer_names[index])
    module = materialize(model, first, layers, run_seed=config.seed, build_whole=whole, ties=spec.ties)
    freeze(module, spec.frozen)
    module.to(torch.device(spec.layout.devices[index])).to(memory_format=MEMORY_FORMATS[spec.memory_format])
    share_memory(module, spec.ties)  # last, as a move separates parameters that share memory
    return module
