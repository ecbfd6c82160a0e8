"""Faults of the engine, planted one at a time in the processes of a check."""

from typing import Any

import pytest

from gpipe_cli.launch.job import Task
from gpipe_cli.pipeline.runtime import executor
from gpipe_cli.pipeline.runtime.deferred_batch_norm import BatchStatistics
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.tied_weights import TiedWeights
from gpipe_cli.training.engine import WorkerProcess


def with_fault(name: str, task: Task, process: WorkerProcess) -> None:
    """The task, in an engine with this fault: a method that does something else, or something before."""
    owner, method, fault, _ = FAULTS[name]
    original = getattr(owner, method)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, lambda *arguments, **settings: fault(original, *arguments, **settings))
        task(process)


def drop_other_uses(sum_gradients: Any, tied: TiedWeights) -> None:
    for uses in tied._trained:
        for use in uses[1:]:
            if use.parameter is not None:
                use.parameter.grad = None
    sum_gradients(tied)


def drop_other_replicas(finish: Any, replicas: Replicas) -> None:
    replicas._buckets[0].work.wait()
    replicas._buckets[0].received[1:] = 0
    finish(replicas)


def keep_first_stages(begin_step: Any, replicas: Replicas, stages: Any, first: list[Any] = []) -> None:  # noqa: B006
    first.append(stages)
    begin_step(replicas, first[0])


def count_stages(begin_step: Any, stage: Stage, *step: Any) -> None:
    stage._first_layer = stage.index
    begin_step(stage, *step)


def draw_again(recompute: Any, stage: Stage, micro_batch: int) -> None:
    stage._step_seed += 1
    recompute(stage, micro_batch)


def repeat_first(split_all: Any, inputs: Any, sizes: Any) -> Any:
    first, *others = split_all(inputs, sizes)
    return [first, *([first] if others else []), *others[1:]]


# Each in a method or function, and what check says of it: the verdict, and the text of the first row that is bad.
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "a use of a tied weight left out": (TiedWeights, "sum_gradients", drop_other_uses,
        "first in layer embedding; the gradient of embedding.weight differs"),
    "a bucket not summed": (Replicas, "finish", drop_other_replicas,
        "first in layer 7; "),
    "buckets of an earlier engine": (Replicas, "begin_step", keep_first_stages,
        "replicas=2: in replicas 0 and 1, the gradient of 0.weight differs after it was summed"),
    "dropout seeded by stage": (Stage, "begin_step", count_stages,
        "first in layer 4; layer 4 gives other values for micro-batch 0"),
    "a micro-batch twice": (executor, "split_all", repeat_first,
        "first in layer 0; layer 0 gives other values for micro-batch 1"),
    "moments of batch norm not committed": (BatchStatistics, "_update", lambda update, *moments: [],
        "first in layer 2; 2.num_batches_tracked differs after the step"),
    "a recomputation with other numbers": (Stage, "recompute", draw_again,
        "first in layer 4; layer 4 gives other values when micro-batch 0 is"),
}  # fmt: skip
