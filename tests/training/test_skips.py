"""Models with long skips in whole trainings: planned to the byte, sent as planned, loaded, exported and checked.

That any cut gives the same weights is shown by `test_segmentation.py`.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
from plan_runs import plan_of
from training_runs import TINY, command, configure, train_here

import gpipe_cli
from gpipe_cli.errors import InputError
from gpipe_cli.models.skips import Pop, Sequence, Stash, find_skips
from gpipe_cli.pipeline.runtime.boundary import OptionalTensors
from gpipe_cli.pipeline.runtime.routes import routes
from gpipe_cli.pipeline.runtime.transport import LocalTransport
from gpipe_cli.pipeline.schedule.schedule import Action, Kind
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.pipeline_spec import placed
from gpipe_cli.results.files import read_result

SETTINGS = [
    *TINY[2:], "model=custom", "model.target=engine_runs:skipping_layers", "dataset.image_size=8",
    "dataset.num_classes=5", "epochs=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_here(configure(*SETTINGS, "partitions=1"), folder)
    return folder


@pytest.mark.parametrize(
    ("balance", "recompute"),
    [("[21]", "always"), ("[5,16]", "never"), ("[4,5,7,5]", "always"), ("[1,9,10,1]", "never")],
)
def test_a_stage_holds_what_was_planned(balance: str, recompute: str, tmp_path: Path) -> None:
    """To the byte: a skip counts where it is taken up, and once where it is also kept by another layer."""
    given = [
        *SETTINGS, f"partitions={balance.count(',') + 1}", f"partition.balance={balance}", f"recompute={recompute}",
        "executor=distributed", "max_steps=2", "schedule=zero_bubble", f"run_folder={tmp_path}",
    ]  # fmt: skip
    assert command("train", *given) == 0
    config = configure(*given)
    assert tuple(read_result(tmp_path)["activation_bytes"]) == plan_of(config, profile_model(config)).saved_bytes


def test_the_layers_between_send_nothing_of_a_skip() -> None:
    """The images go from stage 0 to stage 3; as a tuple they would cross every cut."""
    config = configure(*SETTINGS, "partitions=4", "partition.balance=[4,5,7,5]", "executor=in_process")
    profile = profile_model(config)
    spec = placed(config, profile, plan_of(config, profile))
    sent = {
        (route.sender, route.receiver): {t.skip for t in route.tensors} for route in routes(spec.training_boundaries)
    }
    assert sent == {
        (0, 1): {""}, (0, 2): {"first"}, (0, 3): {"images"}, (1, 2): {"", "several"}, (1, 3): {"same"}, (2, 3): {""},
    }  # fmt: skip


def test_each_edge_carries_what_was_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bytes of a step, forward and back, from each stage to each other."""
    sent = Counter[tuple[Kind, int, int]]()
    send_to = LocalTransport.send_to

    def counted(self: LocalTransport, receiver: int, action: Action, tensors: OptionalTensors) -> None:
        sent[action.kind.direction, action.stage, receiver] += sum(t.nbytes for t in tensors if t is not None)
        send_to(self, receiver, action, tensors)

    config = configure(
        *SETTINGS, "partitions=4", "partition.balance=[4,5,7,5]", "executor=in_process", "max_steps=1",
        "schedule=zero_bubble", "check_layers=false",
    )  # fmt: skip
    profile = profile_model(config)
    spec = placed(config, profile, plan_of(config, profile))
    with monkeypatch.context() as patch:
        patch.setattr(LocalTransport, "send_to", counted)
        train_here(config, tmp_path)
    expected = Counter[tuple[Kind, int, int]]()
    for route in routes(spec.training_boundaries):
        # 8 samples are trained on, and 10 evaluated
        expected[Kind.F, route.sender, route.receiver] += sum(t.bytes(8 + 10) for t in route.tensors)
        expected[Kind.B, route.receiver, route.sender] += sum(t.bytes(8) for t in route.tensors if t.has_gradient)
    assert +sent == +expected


def test_a_loaded_model_runs_by_itself(whole: Path, tmp_path: Path) -> None:
    """And so does the exported file: `gpipe export` evaluates it."""
    model = gpipe_cli.load(whole)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    assert command("export", f"run={whole}", f"file={tmp_path / 'model.safetensors'}") == 0


WRONG = {
    "never popped": ([Stash("a"), torch.nn.ReLU()], r'layer 0: Stash\("a"\) is never popped'),
    "popped before": ([Pop("a"), Stash("a"), Pop("a")], r'layer 0: Pop\("a"\) comes before any Stash'),
    "popped twice": ([Stash("a"), Pop("a"), Pop("a")], r'layer 2: Pop\("a"\) is the second Pop'),
    "stashed twice": ([Stash("a"), Pop("a"), Stash("a"), Pop("a")], r'layer 2: Stash\("a"\) is the second Stash'),
    "inside": ([torch.nn.Sequential(Stash("a"), Pop("a"))], r"layer 0.0 is a Stash inside a layer"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_names_are_checked(wrong: str) -> None:
    layers, message = WRONG[wrong]
    with pytest.raises(InputError, match=message):
        find_skips(Sequence(*layers))
