"""Models with long skips in whole trainings: planned to the byte, and sent past the layers between.

That any cut gives the same weights is shown by `test_segmentation.py`.
"""

from pathlib import Path

import pytest
import torch
from plan_runs import plan_of
from training_runs import TINY, command, configure

from gpipe_cli.errors import InputError
from gpipe_cli.models.skips import Pop, Sequence, Stash, find_skips
from gpipe_cli.pipeline.runtime.routes import routes
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.pipeline_spec import placed
from gpipe_cli.results.files import read_result

SETTINGS = [
    *TINY[2:], "model=custom", "model.target=engine_runs:skipping_layers", "dataset.image_size=8",
    "dataset.num_classes=5", "epochs=1",
]  # fmt: skip


@pytest.mark.parametrize(
    ("balance", "recompute"), [("[5,16]", "never"), ("[4,5,7,5]", "always"), ("[1,9,10,1]", "never")]
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
    spec = placed(plan_of(config, profile))
    sent = {
        (route.sender, route.receiver): {t.skip for t in route.tensors} for route in routes(spec.training_boundaries)
    }
    assert sent == {
        (0, 1): {""}, (0, 2): {"first"}, (0, 3): {"images"}, (1, 2): {"", "several"}, (1, 3): {"same"}, (2, 3): {""},
    }  # fmt: skip


WRONG = {
    "never popped": ([Stash("a"), torch.nn.ReLU()], r'layer 0: Stash\("a"\) is never popped'),
    "inside": ([torch.nn.Sequential(Stash("a"), Pop("a"))], r"layer 0.0 is a Stash inside a layer"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_names_are_checked(wrong: str) -> None:
    layers, message = WRONG[wrong]
    with pytest.raises(InputError, match=message):
        find_skips(Sequence(*layers))
