"""The cut, devices and processes of a run, and what a dry run reports of them."""

from pathlib import Path

import pytest
import torch
from plan_runs import traced
from training_runs import SMALL, TINY, command, configure, spec_of

from gpipe_cli.distributed.torchrun_env import read_torchrun_env
from gpipe_cli.errors import InputError
from gpipe_cli.planner import process_layout
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.planner.process_layout import layout_of
from gpipe_cli.results.files import read_result


def placed(*settings: str) -> PipelineSpec:
    return spec_of(configure(*TINY, *settings), traced(*TINY))


def test_processes_follow_the_executor() -> None:
    turns, spread = (placed("partitions=3", f"executor={executor}") for executor in ("in_process", "distributed"))
    assert (turns.layout.distributed, turns.layout.processes, turns.layout.stages_of(0)) == (False, 1, (0, 1, 2))
    assert turns.max_parameter_tensors == sum(turns.parameter_tensors)
    assert (spread.layout.distributed, spread.layout.processes) == (True, 3)
    assert [spread.layout.stages_of(process) for process in range(3)] == [(0,), (1,), (2,)]
    assert spread.max_parameter_tensors == max(spread.parameter_tensors)


@pytest.mark.parametrize(
    ("gpus", "settings", "rank_of_stage", "stages"),
    [
        (2, "partitions=4", (0, 0, 1, 1), "0 0 1 1"),
        (3, "partitions=4", (0, 0, 1, 2), "0 0 1 2"),
        (8, "partitions=4 stages_per_process=3", (0, 0, 0, 1), "0 0 0 1"),
        (2, "partitions=4 placement=v", (0, 1, 1, 0), "0 1 1 0"),
        (2, "partitions=4 placement=looped executor=in_process", (0, 0, 0, 0), "0 1 0 1"),
        (0, "partitions=4 stages_per_process=2 placement=v", (0, 1, 1, 0), None),
        (0, "partitions=4 schedule=interleaved", (0, 1, 0, 1), None),
        (8, "partitions=4 schedule=interleaved", (0, 1, 0, 1), "0 1 0 1"),
        (8, "partitions=4 schedule=interleaved executor=in_process", (0, 0, 0, 0), "0 1 0 1"),
        (8, "partitions=4 schedule=own.csv micro_batches=1", (1, 0, 0, 1), "1 0 0 1"),
    ],
)
def test_stages_share_gpus_and_processes(
    gpus: int, settings: str, rank_of_stage: tuple[int, ...], stages: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.csv").write_text("1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0\n", encoding="utf-8")
    monkeypatch.setattr(process_layout, "number_of_gpus", lambda config: gpus)
    found = layout_of(configure(*TINY, *settings.split()))
    assert found.rank_of_stage == rank_of_stage
    assert found.devices == (("cpu",) * 4 if stages is None else tuple(f"cuda:{gpu}" for gpu in stages.split()))


@pytest.mark.parametrize(("rank", "here", "local_rank"), [(0, 1, 0), (1, 2, 0), (2, 2, 1)])
def test_a_gpu_under_torchrun_is_that_of_the_local_rank(
    rank: int, here: int, local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes: one on a machine, two on another one."""
    monkeypatch.setattr(process_layout, "number_of_gpus", lambda config: here)
    variables = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": here}
    for name, value in (variables | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match=r"partitions=2: torchrun started 3 processes, and each needs a stage; use"):
        layout_of(configure(*TINY, "partitions=2"), read_torchrun_env())
    found = layout_of(configure(*TINY, "partitions=5"), read_torchrun_env())
    assert found.rank_of_stage == (0, 0, 1, 1, 2)
    assert {found.devices[k] for k in range(5) if found.rank_of_stage[k] == rank} == {f"cuda:{local_rank}"}
    assert found.local_first_stages == (1 if rank == 0 else 0), "the other machine loads nothing"


def test_limits_are_given_or_the_devices_own() -> None:
    def limit(*settings: str) -> int | None:
        return layout_of(configure(*TINY, *settings)).limit_bytes

    assert limit() is None
    assert limit("hardware.memory_gib=8") == 8 * 2**30
    assert limit("hardware=tpu_v3", "partitions=4") == 16 * 2**30
    assert limit("hardware=tpu_v3", "partitions=4", "stages_per_process=2") == 8 * 2**30
    one, two = (limit("recompute=auto", f"partitions={k}") for k in (1, 2))
    assert one is not None
    assert two is not None
    assert one == pytest.approx(2 * two, abs=2)


def test_a_dry_run_needs_neither_data_nor_memory(tmp_path: Path) -> None:
    """Of weights of 43 GB, which nothing allocates."""
    data = ("dataset=image_folder", "dataset.root=nowhere", "dataset.image_size=224", "dataset.num_classes=1000")
    model = ("model.normal_cells=6", "model.filters=4096", "partitions=8", "device=cpu")
    assert command("train", "dry_run=true", f"run_folder={tmp_path}", *model, *data) == 0
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"config", "events", "log", "result"}
    result = read_result(tmp_path)
    assert (result["status"], result["steps"], result["model_parameters"] > 1e10) == ("dry_run", 0, True)
    shares = [part["cost_share"] for part in result["partitions"]]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) < 0.4
    assert torch.get_default_device() == torch.device("cpu")


def test_nearly_all_work_on_one_process_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut left one process with 99.1 % of the cost without a word."""
    costs = f"partition.costs=[{','.join(['1000', *7 * '1'])}]"
    assert command("train", "dry_run=true", *SMALL, "partitions=2", costs, f"run_folder={tmp_path}") == 0
    assert "process 0 has 99.3 % of the work" in " ".join(capsys.readouterr().out.split())


def test_the_order_made_for_text_has_all_micro_batches() -> None:
    """The longest sentences make one micro-batch here, of a sample; shorter ones make all M."""
    config = configure(
        "model=transformer_lm", "model.width=8", "model.hidden=8", "model.heads=2", "model.length=64", "hardware=h200",
        "dataset=synthetic_text", "dataset.vocabulary=50", "batch_size=null", "batch_tokens=64", "schedule=auto",
    )  # fmt: skip
    found = spec_of(config)
    assert [found.schedule(micro_batches).micro_batches for micro_batches in (1, 3, 4)] == [1, 3, 4]
