"""One mini-batch, run in every way that there is: the workers' side of `gpipe check`.

Paper, sections 1 and 2.2: the number of partitions changes nothing. Here that is looked at layer by layer, with the
code that trains: each variant begins anew, with the same weights and seeds, does one step, and leaves the digests of
every layer's outputs, of every gradient, and of what the step makes of weights and statistics.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.learning_rate import learning_rate
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups
from gpipe_cli.pipeline.profile.layer_probes import watching
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_tuple
from gpipe_cli.pipeline.runtime.digests import digest
from gpipe_cli.pipeline.runtime.executor import ActionFailedError, Watch
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.micro_batch import micro_batch_sizes
from gpipe_cli.pipeline.schedule.schedules import Action, Kind
from gpipe_cli.planner.model_profile import refuse_single_samples
from gpipe_cli.planner.placement import Placement
from gpipe_cli.training.data_feed import Data, Reading
from gpipe_cli.training.engine import Engine, WorkerProcess, build_engine
from gpipe_cli.training.fine_tuning import fine_tune
from gpipe_cli.training.milestones import starting_point
from gpipe_cli.training.step import objective_of, placed, rehearse, train_step
from gpipe_cli.verify.differences import (
    TOLERANCE,
    Digests,
    LayersWatched,
    ReferenceDone,
    Row,
    Variant,
    differs,
    first_difference,
    within,
)
from gpipe_cli.verify.plain_pytorch import build_untouched, run_untouched


def check(
    config: TrainConfig,
    placement: Placement,
    process: WorkerProcess,
    *,
    variants: Sequence[Variant],
    earlier: Mapping[str, Digests],
    folder: Path,
    source: Path | None,
) -> None:
    """Run the variants as one process of those that `placement` has, and report a `Row` for each, in order.

    The variants with one partition of which nothing is recomputed are references; they come before what they are
    compared with, and are reported. `earlier` references are those of other processes, by schedule; their gradients
    lie in `folder`. Weights are taken from the checkpoint `source`, if there is one.

    Raises ValueError for what the user can mend, and, where it is not alone, what a variant raises.
    """
    run = None if config.init_from is None else Path(config.init_from)
    data = Data(replace(config, data_workers=0), placement, process.number, starting_point(config, None), run)
    control, groups = process.connect()
    report = process.report
    work = _Runs(config, process, control, groups, data.training_set(control), folder, source)
    if not earlier:
        report(work.watch_layers(variants[0]))
    references = dict(earlier)
    for variant in variants:
        if variant.schedule not in references and not work.is_reference(variant):
            report(variant.row("left out", text=f"the reference of {variant.schedule} failed"))
            continue
        try:
            row, digests = work.compare(variant, references)
        except ChangedInputError as error:
            report(variant.row("fails", layer=error.layer, text=str(error)))
            if control.size > 1:
                raise
            continue
        except ActionFailedError as error:
            cause = " ".join(f"{type(error.__cause__).__name__}: {error.__cause__}".split()).rstrip(".")
            # which micro-batch is the first to fail depends on the schedule; what fails does not
            where = f"layer {error.layer}" if error.layer else f"{error.action.kind.name} of stage {error.action.stage}"
            action, layer = error.action, error.layer or None
            text = f"{where} raises {cause}"
            report(variant.row("fails", layer=layer, stage=action.stage, micro_batch=action.micro_batch, text=text))
            if control.size > 1:
                raise  # its neighbours would wait for it until the timeout
            continue
        if digests is not None:
            references[variant.schedule] = digests
            report(ReferenceDone(variant.schedule, digests))
        if control.leads:
            report(row)
    control.barrier()


@dataclass(frozen=True)
class _Runs:
    """Runs variants in one process."""

    base: TrainConfig
    process: WorkerProcess
    control: ControlGroup
    groups: ProcessGroups | None
    reading: Reading
    folder: Path
    source: Path | None  # of the weights

    def watch_layers(self, variant: Variant) -> LayersWatched:
        """Before the first variant: refuse a mini-batch that cannot be trained on, and watch each layer."""
        config = variant.config(self.base)
        refuse_single_samples(self.base, self.reading.batches.size(0, 0))
        engine = self._engine(config, variant.placement, self.process.watch)
        # what a layer raises is in the rows of the variants; the watch ends there
        with suppress(ActionFailedError, ChangedInputError), watching(engine.stages.values()) as watch:
            rehearse(config, engine, self.control, self._first_mini_batch(), 0, 0)
        sizes = micro_batch_sizes(self.reading.batches.size(0, 0), config.micro_batches)
        inside = engine.stages[0].module.modules()
        norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in inside)
        return LayersWatched(watch.findings, watch.draws, norms, sizes)

    def is_reference(self, variant: Variant) -> bool:
        usual = variant.micro_batches == self.base.micro_batches and variant.executor != "pytorch"
        return usual and variant.placement.partitions == 1 and variant.recompute == "never"

    def compare(self, variant: Variant, references: dict[str, Digests]) -> tuple[Row, Digests | None]:
        """The row of a variant, and what it leaves if it is a reference."""
        kept: dict[str, torch.Tensor] = {}
        if variant.executor == "pytorch":
            return self._compare_untouched(variant, references[variant.schedule]), None
        digests = self._run(variant, kept)
        if self.is_reference(variant):
            save_file(kept, self.folder / f"{variant.schedule}.safetensors")
            if not references:
                return variant.row("reference"), digests
            difference = self._distance(kept, next(iter(references)))
            return within(variant, difference), digests
        if variant.micro_batches != self.base.micro_batches:
            return within(variant, self._distance(kept, variant.schedule)), None
        found = first_difference(variant.placement, digests, references[variant.schedule])
        least = [part for part in self.control.collect(found) if part is not None]
        if not least:
            return variant.row("identical"), None
        return differs(variant, min(least), self._distance(kept, variant.schedule)), None

    def _compare_untouched(self, variant: Variant, reference: Digests) -> Row:
        """Outputs of layers, loss and gradients of plain PyTorch beside those of a pipeline."""
        config, outputs = variant.config(self.base), {}
        engine = self._engine(config, variant.placement, self.process.watch)
        model = build_untouched(config, variant.placement)
        if config.init_from is not None:
            model.load_state_dict(engine.stages[0].module.state_dict())
        reading = self._first_mini_batch()
        inputs, targets = placed(engine, reading.inputs()), reading.targets(0, 0)
        sizes = micro_batch_sizes(reading.batches.size(0, 0), config.micro_batches)
        objective = objective_of(config, targets, sizes, config.label_smoothing, engine.last_device)
        assert inputs is not None
        assert objective is not None

        def observe(layer: str, micro_batch: int, tensors: Tensors) -> None:
            outputs[layer, micro_batch] = digest(tensors)

        try:
            run_untouched(model, config.seed, inputs, sizes, objective, observe)
        except Exception as error:  # the user's own code, which a pipeline has run
            text = " ".join(f"plain PyTorch raises {type(error).__name__}: {error}".split())
            return variant.row("fails", text=text)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        names = dict.fromkeys((name for name, _ in model.named_parameters()), "")
        digests = {name: digest((gradient,)) for name, gradient in gradients.items()}
        own = Digests(objective.totals().means[0], outputs=outputs, gradients=digests, weights=names)
        found = first_difference(variant.placement, own, replace(reference, weights=names))  # no step is done
        if found is None:
            return variant.row("identical")
        distance = self._distance({name: gradient.cpu() for name, gradient in gradients.items()}, variant.schedule)
        return within(variant, distance) if 0 < distance <= TOLERANCE else differs(variant, found, distance)

    def _run(self, variant: Variant, kept: dict[str, torch.Tensor]) -> Digests:
        """Do the step; `kept` gets the gradients of this process."""
        config = variant.config(self.base)
        current: list[Action] = []
        outputs: dict[tuple[str, int], str] = {}
        again: dict[tuple[str, int], str] = {}

        def watch(action: Action, samples: int, lengths: Sequence[int]) -> None:
            current[:] = [action]
            self.process.watch(action, samples, lengths)

        engine = self._engine(config, variant.placement, watch)

        def observe(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                seen = outputs if current[0].kind is Kind.F else again
                seen[name, current[0].micro_batch] = digest(as_tuple(output))

            return hook

        for stage in engine.stages.values():
            for name, layer in stage.module.named_children():
                layer.register_forward_hook(observe(name))

        def keep_gradients() -> None:
            for parameters in engine.parameters.values():
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        kept[name] = parameter.grad.cpu().clone(memory_format=torch.contiguous_format)

        batches = self.reading.batches
        total = config.epochs * batches.steps_per_epoch
        rate = learning_rate(config.learning_rate, 0, batches.steps_per_epoch, config.batch_size, total)
        result = train_step(
            config,
            engine,
            self.control,
            0,
            rate,
            self._first_mini_batch(),
            0,
            0,
            before=None,
            before_update=keep_gradients,
        )
        engine.executor.settle()
        modules = [stage.module for stage in engine.stages.values()]
        return Digests(
            loss=result.metrics.totals.means[0],
            outputs=outputs,
            again=again,
            gradients={name: digest((gradient,)) for name, gradient in kept.items()},
            statistics={name: digest((tensor,)) for module in modules for name, tensor in module.named_buffers()},
            weights={name: digest((tensor,)) for module in modules for name, tensor in module.named_parameters()},
        )

    def _engine(self, config: TrainConfig, placement: Placement, watch: Watch) -> Engine:
        model = build_model(config)
        engine = build_engine(config, placement, self.process.number, self.groups, model, watch,
                              pretrained=config.init_from is None)  # fmt: skip
        fine_tune(config, engine, model, self.source)
        engine.set_progress(1.0)  # drop-path as at the end of the training: at its beginning it drops nothing
        return engine

    def _first_mini_batch(self) -> Reading:
        reading = self.reading
        if reading.loaded is None or reading.split is None:
            return reading
        loaded = LoadedBatches(reading.split, reading.batches, 0, 0, 1, 0)
        return Reading(reading.split, reading.batches, loaded)

    def _distance(self, kept: dict[str, torch.Tensor], schedule: str) -> float:
        """The norm of the difference to a reference's gradients, as a share of their norm; over all processes."""
        difference, norm = 0.0, 0.0
        with safe_open(self.folder / f"{schedule}.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                reference = file.get_tensor(name).double()
                norm += float(reference.square().sum())
                if name in kept:
                    difference += float((kept.pop(name).double() - reference).square().sum())
        difference += sum(float(gradient.double().square().sum()) for gradient in kept.values())
        difference = sum(self.control.collect(difference))
        return float((difference / norm) ** 0.5) if norm else float(difference > 0)
