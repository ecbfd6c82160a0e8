"""Stages that are replayed as graphs: the bits of stages that are not, for every family of models.

The graphs are from `tape.py`; test_gpu.py has a GPU's. Schedules, cuts and recomputation with them are in test_laws.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_runs import plan_of
from tape import Full, TapeMaker
from test_check_matrix import ALIKE, APART, IMAGES, LM, REPLICAS, RUNS, SMALL, _with_models, settings_of
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import assert_same_tensors, configure, final_tensors, of_type, train_here

from gpipe_cli.data.micro_batches import shard_of
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.stage_memory import MemoryModel
from gpipe_cli.training import pipeline_part, train_loop
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import GraphsCaptured, StepDone, TrainingReady

__all__ = ["_with_models"]  # a fixture

# A drop-path's probability grows from step to step; a norm of `odd` has a hook.
LEFT_AS_THEY_ARE = {"amoebanet": "progress changes between steps", "odd": "hook"}


@pytest.fixture(autouse=True)
def _graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: TapeMaker())


def recorded(settings: list[str], folder: Path) -> GraphsCaptured:
    (ready,) = of_type(train_here(configure(*settings), folder), TrainingReady)
    assert ready.graphs is not None
    return ready.graphs


@pytest.mark.parametrize("model", [model for model in RUNS if model not in ALIKE])
def test_replayed_stages_give_the_same_bits(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three steps and evaluations, with uneven micro-batches, dropout, frozen layers, averages, clipping."""
    settings = [one for one in settings_of(model, monkeypatch) if one not in (APART, REPLICAS)]
    average = 0 if model == "custom, keeps tensors" else 0.9  # an expanded buffer has no memory for an average
    settings = [*SMALL, "micro_batches=3", "epochs=3", f"ema_decay={average}", "gradient_clipping=1", *settings]
    train_here(configure(*settings, "partitions=1", "recompute=never", "graphs=false"), tmp_path / "layers")
    found = recorded([*settings, "recompute=always"], tmp_path / "graphs")
    if model in LEFT_AS_THEY_ARE:
        assert LEFT_AS_THEY_ARE[model] in "".join(found.fallback_reasons)
    else:
        assert not found.fallback_reasons
    assert_same_tensors(final_tensors(tmp_path / "graphs"), final_tensors(tmp_path / "layers"))


def test_a_stage_that_cannot_be_replayed_is_refused_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SMALL, *settings_of("amoebanet", monkeypatch)]
    with pytest.raises(InvalidSettingError, match=r"^graphs=true: stage 0: layer .*use graphs=auto$"):
        train_here(configure(*settings, "graphs=true"), Path("run"))


def test_a_stage_without_memory_for_graphs_reports_it_and_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second stage has room for two graphs, of three, when the run begins, and for more when it is tried again."""
    settings = [*SMALL, *RUNS["language model"], "partitions=2", "epochs=3"]
    makers = [TapeMaker(), Full(2)]
    stages = iter(makers)
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: next(stages))
    set_progress = Engine.set_progress

    def give_room(engine: Engine, share: float) -> None:
        makers[1].left += 100 if 0 < share < 1 else 0
        set_progress(engine, share)

    monkeypatch.setattr(Engine, "set_progress", give_room)
    found = recorded(settings, tmp_path / "graphs")
    assert found.stages == 1
    assert found.fallback_reasons == ("stage 1: OutOfMemoryError: no memory is left",)
    assert any(one.replays > 2 for one in makers[1].tapes), "later"
    train_here(configure(*settings, "graphs=false"), tmp_path / "layers")
    assert_same_tensors(final_tensors(tmp_path / "graphs"), final_tensors(tmp_path / "layers"))


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", "always"), ("1f1b", "except_last"), ("zero_bubble", "never")]
)
def test_replayed_stages_hold_as_many_bytes_as_planned(schedule: str, recompute: str, tmp_path: Path) -> None:
    """Autograd's hooks, which count them, are called only while a graph is captured."""
    small = [
        *SMALL,
        *RUNS["language model"],
        "partitions=2",
        "epochs=3",
        f"schedule={schedule}",
        f"recompute={recompute}",
    ]
    counted = [
        [step.activation_bytes for step in of_type(train_here(configure(*small, way), tmp_path / way), StepDone)]
        for way in ("graphs=auto", "graphs=false")
    ]
    assert counted[0] == counted[1]
    assert any(counted[0])


@pytest.mark.parametrize(
    ("model", "recompute", "slots"),
    [
        ("language model", "always", 1),
        ("translation", "always", 1),  # sentences of several lengths
        ("skips", "never", 3),
    ],
)
def test_graphs_of_all_shapes_have_the_memory_of_the_largest(
    model: str, recompute: str, slots: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also for other mini-batches and evaluation. Graphs once had separate memory for each shape."""
    settings = [one for one in settings_of(model, monkeypatch) if one != REPLICAS]
    config = configure(*SMALL, *settings, f"recompute={recompute}", "micro_batches=3", "epochs=3")
    engines: list[Engine] = []
    update_weights = train_loop.update_weights
    monkeypatch.setattr(
        train_loop, "update_weights", lambda engine, *more: (engines.append(engine), update_weights(engine, *more))[1]
    )
    train_here(config, tmp_path)
    plan = plan_of(config, profile_model(config))
    memory = MemoryModel(config, plan.profile, shard_of(plan.step_samples, 3).sizes)
    memory.replays = True
    planned = memory.at_peaks(plan.bounds, *[[0] * len(plan.bounds)] * 2)
    memory.replays = False
    others = memory.at_peaks(plan.bounds, *[[0] * len(plan.bounds)] * 2)
    inputs = [held.input for held in memory.largest(plan.bounds)]
    for k, stage in engines[-1].stages.items():
        assert stage.cuda_graphs is not None
        assert stage.cuda_graphs.captures > slots, "for several shapes, or for evaluation"
        # a plan counts the inputs of captured micro-batches as activations, and those that are being copied there
        static_bytes = planned[k].buffers_bytes - others[k].buffers_bytes + (slots - 1) * inputs[k]
        held = sum(storage.nbytes() for storage in stage.cuda_graphs._memory._buffers.values())
        assert held <= static_bytes
        assert held == static_bytes or (model, recompute) != ("language model", "always")


class Launches(TorchDispatchMode):
    """Counts operations, for which a GPU's host launches something: no views, and no steps that an optimizer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = 0  # of graphs, whose operations no mode sees when they are replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_host = func.namespace == "profiler" or func is torch.ops.aten._local_scalar_dense.default
        self.outside += not (func.is_view or of_host)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("AmoebaNet-D with 18 cells", [*IMAGES, "model.normal_cells=18", "model.filters=4"], 0.02),
        ("digits' AmoebaNet-D with 6 cells", [*IMAGES, "model.normal_cells=6", "model.filters=4"], 0.04),
        ("a language model of 6 layers", [*LM, "model.layers=6"], 0.04),
    ],
)
def test_few_launches_are_left(
    name: str, settings: list[str], most: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a step of 4 micro-batches: gradients, metrics, update and averages, by operations on lists as on a GPU."""
    maker, with_graphs, without = TapeMaker(), list[int](), list[int]()
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: maker)

    def counting(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(engine: Engine, *arguments: Any, **more: Any) -> Any:
            for optimizer in engine.optimizers.values():
                assert optimizer is not None
                for group in optimizer.param_groups:
                    group["foreach"] = True
            before = {tape: tape.replays for tape in maker.tapes}
            with Launches() as counter:
                returned = work(engine, *arguments, **more)
            replays = {tape: tape.replays - before.get(tape, 0) for tape in maker.tapes}
            with_graphs.append(counter.outside + sum(replays.values()))
            without.append(counter.outside + sum(tape.launches * n for tape, n in replays.items()))
            return returned

        return run

    for work in ("compute_gradients", "update_weights"):
        monkeypatch.setattr(train_loop, work, counting(getattr(train_loop, work)))
    more = [
        "partitions=1",
        "epochs=1",
        "dataset.train_samples=24",
        "micro_batches=4",
        "ema_decay=0.9",
        "data_workers=1",
    ]
    train_here(configure(*SMALL, *settings, *more), tmp_path)
    few, all_of_them = sum(with_graphs[-2:]), sum(without[-2:])  # of the third step, whose graphs exist
    print(f"{name}: {few:,} of {all_of_them:,} launches a step, {few / all_of_them:.1%}")
    assert few <= most * all_of_them
