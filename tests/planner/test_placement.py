"""The cut and the placement of a run, and what a dry run says of them."""

from pathlib import Path

import pytest
import torch
from training_runs import TINY, command, configure

from gpipe_cli.assembly.build import build_model
from gpipe_cli.launch.prepare import prepare
from gpipe_cli.planner.placement import make_placement
from gpipe_cli.reporting.run.result import read_result


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_every_layer_is_somewhere_and_nothing_is_counted_twice() -> None:
    config = configure(*TINY, "partitions=3")
    layout, whole = make_placement(config), make_placement(configure(*TINY, "partitions=1"))
    model = build_model(config)
    assert [name for names in layout.layer_names for name in names] == [name for name, _ in model.named_children()]
    assert sum(layout.parameters) == whole.parameters[0] == sum(p.numel() for p in model.parameters())
    assert sum(layout.parameter_tensors) == whole.parameter_tensors[0] == len(list(model.parameters()))
    assert sum(layout.cost) == pytest.approx(whole.cost[0])
    assert max(layout.cost) < whole.cost[0] / 2
    assert layout.first_layers == (0, len(layout.layer_names[0]), len(layout.layer_names[0] + layout.layer_names[1]))
    assert len(layout.training_boundaries) == len(layout.evaluation_boundaries) == 2


def test_the_auxiliary_logits_cross_boundaries_in_training_only() -> None:
    layout = make_placement(configure(*TINY, "partitions=2", "partition.balance=[7,1]", "model.auxiliary_head=true"))
    assert len(layout.training_boundaries[0]) == len(layout.evaluation_boundaries[0]) + 1
    assert all(tensor.has_gradient for tensor in layout.training_boundaries[0][-1:])


def test_a_balance_that_was_asked_for() -> None:
    layout = make_placement(configure(*TINY, "partitions=3", "partition.balance=[1,5,1]"))
    assert [len(names) for names in layout.layer_names] == [1, 5, 1]
    assert layout.first_layers == (0, 1, 6)


def test_processes_follow_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make_placement(configure(*TINY, "partitions=1"))
    assert (alone.distributed, alone.processes, alone.one_device, alone.stages_of(0)) == (False, 1, False, range(1))
    turns = make_placement(configure(*TINY, "partitions=3", "executor=in_process"))
    assert (turns.distributed, turns.processes, turns.one_device, turns.stages_of(0)) == (False, 1, True, range(3))
    assert turns.most_parameter_tensors == sum(turns.parameter_tensors)
    spread = make_placement(configure(*TINY, "partitions=3", "executor=distributed"))
    for cores, shared in ((2, True), (3, False)):  # on two cores three processes take turns
        monkeypatch.setattr("gpipe_cli.planner.placement.usable_cores", lambda cores=cores: cores)
        assert (spread.distributed, spread.processes, spread.one_device) == (True, 3, shared)
    assert [spread.stages_of(process) for process in range(3)] == [range(0, 1), range(1, 2), range(2, 3)]
    assert spread.most_parameter_tensors == max(spread.parameter_tensors)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("partitions=3 executor=distributed", ["cores"]),  # 3 processes of 1 thread on two cores
        ("partitions=2 executor=distributed threads=2", ["cores"]),
        ("partitions=1 threads=3", ["cores"]),
        ("partitions=2 executor=in_process", ["devices"]),
        ("partitions=2 executor=distributed", []),
        ("partitions=1 threads=2", []),
    ],
)
def test_more_stages_than_cores_are_said_before_the_run(
    settings: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("planner.devices", "planner.placement", "launch.prepare"):
        monkeypatch.setattr(f"gpipe_cli.{module}.usable_cores", lambda: 2)
    prepared = prepare(configure(*TINY, *settings.split()), (), print)
    assert [label for label, _ in prepared.notes] == said
    assert prepared.layout.one_device == bool(said)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("partitions=2", r"partitions=2: torchrun started 3 processes, one per partition is needed; use partitions=3"),
        ("partitions=3 executor=in_process", r"executor=in_process: torchrun started 3 processes"),
    ],
)
def test_torchrun_with_other_numbers_is_refused(settings: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        make_placement(configure(*TINY, *settings.split()))


def dry_run(tmp_path: Path, *settings: str) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        assert command(patch, "train", "dry_run=true", f"run_folder={tmp_path}", "device=cpu", *settings) == 0
    files = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert files == ["config", "events", "partitions", "result"]
    result = read_result(tmp_path)
    assert (result["status"], result["steps"]) == ("dry_run", 0)
    return result


def test_a_dry_run_of_the_papers_imagenet_model(tmp_path: Path) -> None:
    """AmoebaNet-B (18, 512) has 557 million parameters (paper, section 4); no data and no memory are needed."""
    settings = (
        "model.variant=b model.normal_cells=18 model.filters=512 partitions=4 micro_batches=16 dataset=image_folder "
    )
    settings += "dataset.root=nowhere dataset.image_size=331 dataset.num_classes=1000"
    result = dry_run(tmp_path, *settings.split())
    assert result["model_parameters"] == 557_277_864
    partitions = result["partitions"]
    assert isinstance(partitions, list)
    assert sum(part["cost_share"] for part in partitions) == pytest.approx(1)
    assert max(part["cost_share"] for part in partitions) < 0.4


def test_a_dry_run_of_billions_of_parameters(tmp_path: Path) -> None:
    """16 GB of weights alone, which nothing here allocates."""
    before = torch.get_default_device()
    settings = ["model.normal_cells=6", "model.filters=4096", "dataset=synthetic_images", "dataset.image_size=224"]
    parameters = dry_run(tmp_path, *settings, "partitions=8")["model_parameters"]
    assert isinstance(parameters, int)
    assert parameters > 4e9
    assert torch.get_default_device() == before
