"""The cut, devices and processes of a run, and what a dry run says of them."""

import re
from pathlib import Path

import pytest
import torch
from plan_runs import traced
from training_runs import TINY, command, configure, spec_of

from gpipe_cli.commands import prepare
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.planner import layout
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.results.files import read_result


def placed(*settings: str) -> PipelineSpec:
    return spec_of(configure(*TINY, *settings), traced(*TINY))


def test_processes_follow_the_executor() -> None:
    turns, spread = (placed("partitions=3", f"executor={executor}") for executor in ("in_process", "distributed"))
    assert (turns.layout.distributed, turns.layout.processes, turns.layout.stages_of(0)) == (False, 1, (0, 1, 2))
    assert turns.most_parameter_tensors == sum(turns.parameter_tensors)
    assert (spread.layout.distributed, spread.layout.processes) == (True, 3)
    assert [spread.layout.stages_of(process) for process in range(3)] == [(0,), (1,), (2,)]
    assert spread.most_parameter_tensors == max(spread.parameter_tensors)


def test_a_cut_by_hand_is_the_cut() -> None:
    layers = len(traced(*TINY).costs)
    spec = placed("partitions=2", f"partition.balance=[1,{layers - 1}]")
    assert [len(names) for names in spec.layer_names] == [1, layers - 1]


def test_more_stages_in_a_process_than_there_are_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"^stages_per_process=4: .* use stages_per_process=2, or partitions=4 or"):
        layout_of(configure(*TINY, "partitions=2", "stages_per_process=4"))


@pytest.mark.parametrize(
    ("gpus", "settings", "process_of_stage", "stages"),
    [
        (1, "partitions=4", (0, 0, 0, 0), "0 0 0 0"),
        (2, "partitions=4", (0, 0, 1, 1), "0 0 1 1"),
        (3, "partitions=4", (0, 0, 1, 2), "0 0 1 2"),
        (8, "partitions=4", (0, 1, 2, 3), "0 1 2 3"),
        (8, "partitions=4 stages_per_process=3", (0, 0, 0, 1), "0 0 0 1"),
        (2, "partitions=4 executor=in_process", (0, 0, 0, 0), "0 0 1 1"),
        (2, "partitions=4 placement=v", (0, 1, 1, 0), "0 1 1 0"),
        (2, "partitions=4 placement=looped executor=in_process", (0, 0, 0, 0), "0 1 0 1"),
        (0, "partitions=4 stages_per_process=2", (0, 0, 1, 1), None),
        (0, "partitions=4 stages_per_process=2 placement=v", (0, 1, 1, 0), None),
        (8, "partitions=4 placement=own.csv", (1, 0, 0, 1), "1 0 0 1"),
        (8, "partitions=4 placement=own.csv executor=in_process", (0, 0, 0, 0), "1 0 0 1"),
        (1, "partitions=4 placement=own.csv executor=in_process", (0, 0, 0, 0), "0 0 0 0"),
        (0, "partitions=4 placement=own.csv schedule=auto", (1, 0, 0, 1), None),
    ],
)
def test_stages_share_gpus_and_processes(
    gpus: int, settings: str, process_of_stage: tuple[int, ...], stages: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.csv").write_text("1,2\n0,3\n", encoding="utf-8")
    monkeypatch.setattr(layout, "number_of_gpus", lambda config: gpus)
    found = layout_of(configure(*TINY, *settings.split()))
    assert found.process_of_stage == process_of_stage
    assert found.devices == (("cpu",) * 4 if stages is None else tuple(f"cuda:{gpu}" for gpu in stages.split()))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("partitions=5", "placement=own.csv: has 4 partitions, and partitions=5; use partitions=4"),
        ("partitions=4 stages_per_process=2", "stages_per_process=2: placement=own.csv says it; leave it out"),
        ("partitions=4 schedule=interleaved", "placement=own.csv: schedule=interleaved is made for placement=looped;"),
        ("partitions=4 schedule=own.csv", "placement=own.csv: schedule=own.csv says which device has which stages;"),
    ],
)
def test_a_placement_that_does_not_fit_the_other_settings(settings: str, line: str) -> None:
    Path("own.csv").write_text("1,2\n0,3\n", encoding="utf-8")
    with pytest.raises(InputError, match=f"^{re.escape(line)}"):
        layout_of(configure(*TINY, "placement=own.csv", *settings.split()))


@pytest.mark.parametrize(("settings", "boundaries", "sums"), [
    ("partitions=4 executor=in_process", 0, 0), ("partitions=2", 1, 0), ("partitions=4", 2, 0),
    ("partitions=4 stages_per_process=2", 1, 0), ("partitions=4 schedule=interleaved stages_per_process=2", 3, 0),
    ("partitions=4 placement=v stages_per_process=2", 2, 0),
    ("partitions=4 replicas=2", 2, 1), ("partitions=4 replicas=2 executor=in_process", 0, 1),
])  # fmt: skip
def test_a_gpu_holds_nccl_s_buffers_too(
    settings: str, boundaries: int, sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the process with the most neighbours: no plan counted them."""
    monkeypatch.setattr(layout, "number_of_gpus", lambda config: 8)
    found = layout.nccl_bytes(layout_of(configure(*TINY, *settings.split(), "batch_size=8")))
    assert found == boundaries * 48 * 2**20 + sums * layout._SUMS_BYTES


@pytest.mark.parametrize(("rank", "here", "local_rank"), [(0, 1, 0), (1, 2, 0), (2, 2, 1)])
def test_a_gpu_under_torchrun_is_that_of_the_local_rank(
    rank: int, here: int, local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes: one on a machine, two on another one."""
    monkeypatch.setattr(layout, "number_of_gpus", lambda config: here)
    variables = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": here}
    for name, value in (variables | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match=r"partitions=2: torchrun started 3 processes, and each needs a stage; use"):
        layout_of(configure(*TINY, "partitions=2"), torchrun())
    with pytest.raises(InputError, match=r"executor=in_process: torchrun started 3 processes"):
        layout_of(configure(*TINY, "partitions=3", "executor=in_process"), torchrun())
    Path("own.csv").write_text("1,2\n0,3\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"placement=own\.csv: is for 2 devices, and torchrun started 3 processes for"):
        layout_of(configure(*TINY, "partitions=4", "placement=own.csv"), torchrun())
    found = layout_of(configure(*TINY, "partitions=5"), torchrun())
    assert found.process_of_stage == (0, 0, 1, 1, 2)
    assert {found.devices[k] for k in range(5) if found.process_of_stage[k] == rank} == {f"cuda:{local_rank}"}
    monkeypatch.setattr(layout, "number_of_gpus", lambda config: here - 1)
    with pytest.raises(InputError, match=r"device=cuda: there is no CUDA" if here == 1 else r"1 GPUs|there are 1; use"):
        layout_of(configure(*TINY, "partitions=5", "device=cuda"), torchrun())


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ("partitions=3 executor=distributed", ["cores"]),  # 3 processes of 1 thread on two cores
        ("partitions=1 threads=3", ["cores"]),
        ("partitions=2 executor=in_process", ["devices"]),
        ("partitions=2 executor=distributed", []),
        ("partitions=1 threads=2", []),
    ],
)
def test_a_note_before_the_run_says_that_stages_take_turns(
    settings: str, labels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (layout, prepare):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)
    made = placed(*settings.split())
    assert [label for label, _ in prepare._turns(made.layout)] == labels
    assert made.layout.one_device == bool(labels)


@pytest.mark.parametrize(
    ("settings", "stages", "use"),
    [
        ("partitions=4 stages_per_process=3", "3 + 1 stages: process 0 has ", "stages_per_process=2 is"),
        ("partitions=3 stages_per_process=2", "2 + 1 stages: process 0 has ", "partitions=4 is"),
        ("partitions=7 stages_per_process=2", "2 + 2 + 2 + 1 stages: process ", ""),  # of 7 layers
        ("partitions=4 executor=in_process", "", ""),
    ],
)
def test_a_note_says_that_processes_have_uneven_work(settings: str, stages: str, use: str) -> None:
    """The cut does not know of processes: one with three of four stages had 72 % of the work, and nothing said so."""
    config = configure(*TINY, *settings.split())
    notes = dict(prepare._uneven(config, spec_of(config, traced(*TINY))))
    assert notes.get("processes", "").startswith(stages)
    assert ("; " in notes.get("processes", "")) == bool(use)
    if use:
        assert use in notes["processes"]
        better = configure(*TINY, *settings.split(), use.split()[0])
        assert not list(prepare._uneven(better, spec_of(better, traced(*TINY))))


def test_a_note_says_what_a_plan_of_compiled_layers_does_not_know() -> None:
    config = configure(*TINY, "compile=true", "hardware=cpu", "partitions=1")
    assert "compile=false" in dict(prepare.prepare(config, (), lambda line: None).notes)["planned"]


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


def test_the_order_made_for_text_has_all_micro_batches() -> None:
    """The longest sentences make one micro-batch here, of a sample; shorter ones make all M."""
    config = configure(
        "model=transformer_lm", "model.width=8", "model.hidden=8", "model.heads=2", "model.length=64", "hardware=h200",
        "dataset=synthetic_text", "dataset.vocabulary=50", "batch_size=null", "batch_tokens=64", "schedule=auto",
    )  # fmt: skip
    found = spec_of(config)
    assert [found.schedule(micro_batches).micro_batches for micro_batches in (1, 3, 4)] == [1, 3, 4]
