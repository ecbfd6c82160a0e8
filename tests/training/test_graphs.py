"""Stages that are replayed as graphs: the bits of stages that are not, for every family of models.

The graphs are those of `tape.py`; test_gpu.py has a GPU's. What schedules, cuts and recomputation do to them is in
test_laws.py.
"""

from pathlib import Path

import pytest
from tape import TapeMaker
from test_check_matrix import ALIKE, APART, REPLICAS, RUNS, SMALL, _with_models, settings_of
from training_runs import assert_same_tensors, configure, final_tensors, of_type, train_here

from gpipe_cli.config.typed import RefusedError
from gpipe_cli.training import pipeline_part
from gpipe_cli.training.events import GraphsRecorded, StepDone, TrainingReady

__all__ = ["_with_models"]  # a fixture

# A drop-path's probability grows from step to step; a norm of `odd` has a hook.
LEFT_AS_THEY_ARE = {"amoebanet": "progress changes between steps", "odd": "hook"}


@pytest.fixture(autouse=True)
def _graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: TapeMaker())


def recorded(settings: list[str], folder: Path) -> GraphsRecorded:
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
        assert LEFT_AS_THEY_ARE[model] in "".join(found.causes)
    else:
        assert not found.causes
    assert_same_tensors(final_tensors(tmp_path / "graphs"), final_tensors(tmp_path / "layers"))


def test_a_stage_that_cannot_be_replayed_is_refused_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SMALL, *settings_of("amoebanet", monkeypatch)]
    with pytest.raises(RefusedError, match=r"^graphs=true: stage 0: layer .*use graphs=auto$"):
        train_here(configure(*settings, "graphs=true"), Path("run"))


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", "always"), ("1f1b", "except_last"), ("zero_bubble", "never")]
)
def test_replayed_stages_hold_as_many_bytes_as_planned(schedule: str, recompute: str, tmp_path: Path) -> None:
    """Autograd's hooks, which count them, are called only while a graph is recorded."""
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
