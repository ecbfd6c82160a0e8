"""A process's part of a pipeline, built from the pipeline's cut: for a run (`engine.py`) or a user's program
(`library/`)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from operator import attrgetter

import torch
from torch import nn

from gpipe_cli.assembly.build import AUTOCAST_DTYPE, MEMORY_FORMATS
from gpipe_cli.assembly.optimizer import gradients_of
from gpipe_cli.distributed.process_groups import ProcessGroups
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.runtime.compilation import compile_counts
from gpipe_cli.pipeline.runtime.executor import Executor, OnAction, ignore_action
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.routes import Boundaries, inputs_of, outputs_of
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.step_timings import StepTimings
from gpipe_cli.pipeline.runtime.tied_weights import TiedWeights
from gpipe_cli.pipeline.runtime.transport import LocalTransport, Transport
from gpipe_cli.planner.pipeline_spec import PipelineCut
from gpipe_cli.system.cuda_graphs import graph_maker


@dataclass(frozen=True)
class PipelinePart:
    """This process's part of a pipeline: its stages (by index), and what runs schedules on them."""

    spec: PipelineCut
    stages: Mapping[int, Stage]
    executor: Executor
    boundaries: Boundaries  # what the transport reads at every step: changed where inputs have other shapes
    tied: TiedWeights
    replicas: Replicas | None  # None if there is only one pipeline

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.spec.partitions - 1 in self.stages

    @property
    def uses_cuda_graphs(self) -> bool:
        return any(stage.cuda_graphs is not None for stage in self.stages.values())

    @property
    def first_device(self) -> torch.device:
        return torch.device(self.spec.layout.devices[0])

    @property
    def last_device(self) -> torch.device:
        return torch.device(self.spec.layout.devices[-1])

    def set_autocast_dtype(self, dtype: torch.dtype | None) -> None:
        """From now on, layers compute in `dtype` where autocast uses it; None: in the types of their inputs."""
        for stage in self.stages.values():
            stage.set_autocast_dtype(dtype)

    def compile(self, inputs: Boundary, sizes: Iterable[int], lengths: Sequence[int] = ()) -> Counter[str]:
        """Compile all layers of this process for micro-batches of `sizes` samples, with `inputs` for the first layer;
        returns the `compile_counts` of that. Raises InvalidSettingError, which names the layer that does not
        compile."""
        before = compile_counts()
        for samples, (k, stage) in product(sizes, self.stages.items()):
            given = inputs_of(self.boundaries.training, k) if k else inputs
            stage.compile(given, samples, lengths)
        return compile_counts() - before

    def check_still_frozen(self) -> None:
        """Raises InputError for a parameter that is trained now, and was frozen when its stage was built, where its
        gradient would be lost: in a stage that runs no backward, with tied weights, or with replicas."""
        for stage in self.stages.values():
            if stage.needs_backward and not self.tied.ties and self.replicas is None:
                continue
            for name, parameter in stage.frozen:
                if parameter.requires_grad:
                    why = "is trained now, and was frozen when the pipeline was built"
                    raise InputError(f"{name} {why}; build the pipeline again")

    def sum_gradients(self, timings: StepTimings) -> None:
        """After the last action of a step: wait for the sums of gradients over replicas, and sum tied weights' over
        their uses."""
        clocks = self.executor.timer.clocks
        adding = set(self.stages) if self.replicas is not None else self.tied.stages_with_remote_uses
        waits = {k: clocks[k].now() for k in adding}
        if self.replicas is not None:
            self.replicas.finish()
        self.tied.sum_gradients()
        if self.uses_cuda_graphs:
            for stage in self.stages.values():
                _remove_negative_zeros(gradients_of(stage.module.parameters()))
        for k in adding:
            timings.mark_gradient_sync(k, waits[k], clocks[k].now())


def _remove_negative_zeros(gradients: Sequence[torch.Tensor]) -> None:
    """CUDA graphs add every gradient to zeros, so that none is -0.0: do the same where kernels are launched singly."""
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
    for _, group in groupby(dense, key=attrgetter("device")):
        torch._foreach_add_(list(group), 0.0)


def build_part(
    spec: PipelineCut,
    stages: Mapping[int, Stage],
    process: int,
    groups: ProcessGroups | None,
    on_action: OnAction = ignore_action,
) -> PipelinePart:
    """Connect the stages of a process, given by its rank in the run, with each other and, over `groups`, with those in
    other processes and other replicas."""
    layout = spec.layout
    rank_in_pipeline = process % layout.processes_per_pipeline
    device = torch.device(layout.device_of(process))
    memory_format = MEMORY_FORMATS[spec.memory_format]
    boundaries = Boundaries(spec.training_boundaries, spec.evaluation_boundaries, memory_format, spec.layer_names)
    transport: Transport
    if groups is None or not layout.distributed:
        transport = LocalTransport([*map(torch.device, layout.devices)], boundaries)
    else:
        transport = P2PTransport(rank_in_pipeline, layout.rank_of_stage, groups.links, boundaries, device)
    replicas = None
    if groups is not None and groups.replicas:
        replicas = Replicas(groups.replicas, layout.replicas, groups.links.waits)
        replicas.connect(groups.links.connect_seconds)
    tied = TiedWeights(spec.ties, spec.stages_of_ties, stages, rank_in_pipeline, layout.rank_of_stage)
    if groups is not None and groups.tied:
        tied = replace(tied, groups=groups.tied, links=groups.links)
        tied.connect(device, groups.links.connect_seconds)
    executor = Executor(stages, layout.device_of_stage, transport, on_action)
    return PipelinePart(spec, stages, executor, boundaries, tied, replicas)


def build_stage(spec: PipelineCut, index: int, layers: nn.Sequential, run_seed: int) -> Stage:
    """Stage `index`, in training mode; `layers` are its layers with their values, on its device."""
    stage = Stage(
        index,
        layers,
        first_layer=spec.first_layers[index],
        inputs=inputs_of(spec.training_boundaries, index),
        evaluation_inputs=inputs_of(spec.evaluation_boundaries, index),
        outputs=outputs_of(spec.training_boundaries, index),
        device=torch.device(spec.layout.devices[index]),
        run_seed=run_seed,
        memory_format=MEMORY_FORMATS[spec.memory_format],
        autocast_dtype=AUTOCAST_DTYPE[spec.precision],
        compiled=spec.compile,
    )
    stage.set_training(True)
    if spec.graphs and (maker := graph_maker(stage.device)) is not None:
        stage.use_cuda_graphs(maker)
    return stage
