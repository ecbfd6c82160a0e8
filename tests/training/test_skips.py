"""Models with long skips in whole trainings: planned to the byte, and sent past the layers between.

That any cut gives the same weights is shown by `test_check_matrix.py` and `pipeline/test_laws.py`.
"""

import re
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from plan_runs import plan_of
from torch import nn
from training_runs import TINY, command, configure

from gpipe_cli.library.pipeline import Pipeline
from gpipe_cli.models.skips import Pop, SkipSequential, Stash
from gpipe_cli.pipeline.runtime.routes import routes
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.pipeline_spec import spec_from_plan
from gpipe_cli.results.files import read_result

SETTINGS = [
    *TINY[2:], "model=custom", "model.target=engine_runs:skipping_layers", "dataset.image_size=8",
    "dataset.num_classes=5", "epochs=1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("balance", "recompute"), [("[5,16]", "never"), ("[4,5,7,5]", "always"), ("[1,9,10,1]", "never")]
)
def test_a_stage_holds_what_was_planned(balance: str, recompute: str, tmp_path: Path) -> None:
    """To the byte: a skip counts where it is popped, and once where it is also kept by another layer."""
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
    spec = spec_from_plan(plan_of(config, profile))
    sent = {
        (route.sender, route.receiver): {t.skip for t in route.tensors} for route in routes(spec.training_boundaries)
    }
    assert sent == {
        (0, 1): {""}, (0, 2): {"first"}, (0, 3): {"images"}, (1, 2): {"", "several"}, (1, 3): {"same"}, (2, 3): {""},
    }  # fmt: skip


# Skips that cannot be -> the names of the layers and of the skip, and the remedy, that the message must have.
WRONG = {
    "never popped": ([nn.ReLU(), Stash("a"), nn.ReLU()], r'layer 1: Stash\("a"\) is never popped; add a Pop'),
    "inside": ([nn.Sequential(Stash("a"), Pop("a"))], r"layer 0.0 is a Stash within a layer.*; make it a layer"),
    "before": ([nn.ReLU(), Pop("a"), Stash("a")], r'layer 1: Pop\("a"\) .* layer 2; put that Stash before it'),
    "twice": ([Stash("a"), Pop("a", "add"), Pop("a")], r'layer 2: Pop\("a"\) .* layer 1; give each'),
    "stashed twice": ([Stash("a"), Stash("a"), Pop("a")], r'layer 1: Stash\("a"\) .* layer 0; give each'),
    "shapes": (
        [Stash("a"), nn.Linear(8, 6), Pop("a", "add")],
        r'layer 2: Pop\("a"\) .*\(\d, 3, 8, 6\).*\(\d, 3, 8, 8\).* layer 0; .*equal shapes.*: change a layer',
    ),
    "broadcast": ([Stash("a"), nn.Linear(8, 1), Pop("a", "add")], r'layer 2: Pop\("a"\) .* layer 0; .*equal shapes'),
    "cat": (
        [Stash("a"), nn.Flatten(), Pop("a")],
        r'layer 2: Pop\("a"\) .* layer 0; .*dimension 1 only: change a layer',
    ),
    "function": ([Stash("a"), nn.ReLU(), Pop("a", torch.relu)], r'layer 2: Pop\("a"\) .* layer 0; .* or join$'),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_skips_are_refused(wrong: str) -> None:
    """Not by a KeyError, nor by torch's errors about shapes."""
    layers, message = WRONG[wrong]
    example = torch.zeros(2, 3, 8, 8)
    with pytest.raises(ValueError, match=message):
        SkipSequential(*layers)(example)
    with pytest.raises(ValueError, match=message):
        Pipeline(nn.Sequential(*layers, nn.Conv2d(3, 1, 1)), example, partitions=1, micro_batches=1)


@pytest.mark.parametrize("name", ["before", "join"])
def test_a_command_refuses_wrong_skips(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before any layer is run: it fell over the first with a traceback, and called the second one loading of files."""
    unknown: Any = "mul"
    layers = {"before": lambda: WRONG["before"][0], "join": lambda: [Stash("a"), Pop("a", unknown)]}
    messages = {"before": WRONG["before"][1], "join": r"""model\.target=.*Pop\("a"\): join='mul' .*; use "cat\""""}
    monkeypatch.setattr(networks, name, lambda: nn.Sequential(*layers[name](), nn.Conv2d(3, 3, 1)), raising=False)
    assert command("plan", "model=custom", f"model.target=networks:{name}", *SETTINGS[-3:], "partitions=1") == 2
    assert re.search(rf"^gpipe plan: {messages[name]}[^\n]*\n$", capfd.readouterr().err)
