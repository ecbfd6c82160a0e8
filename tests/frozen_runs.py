"""A small pipelined training in this process with layers that are frozen, for the tests of the laws."""

from itertools import accumulate

import torch
from engine_runs import Case, CrossEntropy, data, tricky_model

from gpipe_cli.pipeline.profile import tracing
from gpipe_cli.pipeline.runtime import boundary
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.frozen import Frozen, freeze
from gpipe_cli.pipeline.runtime.materialize import materialize
from gpipe_cli.pipeline.runtime.micro_batch import micro_batch_sizes, split
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.transport import LocalTransport
from gpipe_cli.pipeline.schedule import schedules as schedule

CPU = torch.device("cpu")


def run_frozen(case: Case, frozen: Frozen) -> dict[str, torch.Tensor]:
    """Two steps of the tricky model; returns losses, the gradients that there are, and the final state by name."""
    model = tricky_model()
    freeze(model, frozen)
    images = boundary.as_boundary((torch.empty(1, 3, case.size, case.size),))
    costs = tracing.trace_layers(model, images, training=True)
    assert case.balance is not None
    starts = [0, *accumulate(case.balance)]
    stages = {}
    for k, layers in enumerate(case.balance):
        module = materialize(model, starts[k], layers, run_seed=7, device=CPU)
        freeze(module, frozen)
        inputs = costs[starts[k] - 1].outputs if k else ()
        stages[k] = Stage(k, module, first_layer=starts[k], inputs=inputs, device=CPU, run_seed=7)
        stages[k].set_training(True)
    executor = Executor(stages, case.partitions, LocalTransport([CPU] * case.partitions))
    results: dict[str, torch.Tensor] = {}
    for step, samples in enumerate(case.samples):
        sizes = micro_batch_sizes(samples, case.micro_batches)
        pictures, targets = data(case, step)
        objective = CrossEntropy(split(targets, sizes), samples)
        order = schedule.build(case.schedule, case.partitions, len(sizes), case.recompute)
        executor.run(order, step, sizes, (pictures,), objective)
        results |= {f"loss {step} {m}": loss for m, loss in objective.losses.items()}
        for stage in stages.values():
            for name, parameter in stage.module.named_parameters():
                assert (parameter.grad is not None) == parameter.requires_grad, name
                if parameter.grad is not None:
                    results[f"gradient {step} {name}"] = parameter.grad.clone()
                    with torch.no_grad():
                        parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for stage in stages.values():
        results |= {f"final {name}": value.clone() for name, value in stage.module.state_dict().items()}
    return results
