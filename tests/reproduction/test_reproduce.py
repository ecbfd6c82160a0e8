"""From a recipe to its tables: what is said of the user's settings, whatever the experiment."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import Answer, answering, shares_of_a_step

from gpipe_cli.config.typed import RefusedError
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reproduction.recipe import explained, load
from gpipe_cli.reproduction.runner import Gpu

RESIZED = "model.filters=16: in every command; what else is said of models and sizes (titles, scaled down, our choice, the paper's size) holds for the recipe without them"  # noqa: E501


def breakdown(
    folder: Path, given: Sequence[str], gpus: Sequence[Gpu] = (), answer: Answer = shares_of_a_step
) -> Reproduction:
    perform = answering(folder, answer).perform
    return load("breakdown").reproduce("desk", "", gpus, given, folder, perform, lambda line: None)


def test_what_the_user_gave_stands_beside_what_is_said_of_the_recipe(tmp_path: Path) -> None:
    """A model of 16 filters was called `AmoebaNet-D (18, 32)`, as if nothing had been given."""
    for given, note in (((), None), (("seed=1",), "seed=1: in every command"), (("model.filters=16",), RESIZED)):
        notes = dict(breakdown(tmp_path, given).notes)
        assert notes.get("given") == note
        assert notes["scaled down"].startswith("AmoebaNet-D (18, 32)")


def test_a_gpu_that_was_not_used_is_not_the_machine(tmp_path: Path) -> None:
    assert "GPU" not in breakdown(tmp_path, (), [Gpu("H200", 2**37)]).machine  # the desk's device=cpu
    assert breakdown(tmp_path, ("device=auto",), [Gpu("H200", 2**37)]).machine.startswith("1 GPU (H200), ")


def test_settings_that_leave_size_and_data_as_they_are(tmp_path: Path) -> None:
    given = ("checkpoint.keep=1", "++device=cpu", "steps=2", "steps_more=1", "dataset.root=data", "dataset=digits")
    assert answering(tmp_path, shares_of_a_step, *given).changed() == ("steps_more=1", "dataset=digits")
    users = answering(tmp_path, shares_of_a_step, "partitions=8", "partition.balance=[1,2]", "epochs=1")
    assert users.changed("partitions", "partition") == ("epochs=1",)


def test_a_refused_setting_that_nobody_typed_is_called_the_recipes(tmp_path: Path) -> None:
    def refuses(error: RefusedError) -> Answer:
        def machine(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
            raise error

        return machine

    for error, place in (
        (RefusedError("model.filters", 32, "too many"), " (a setting of this recipe at desk scale)"),
        (RefusedError("recompute", "always", "no"), " (a setting of this recipe)"),  # of its file
        (RefusedError("batch_size", 8, "too few"), ""),  # the user's
        (RefusedError("executor", "auto", "no"), ""),  # nobody's: its default
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(str(error) + place)}$"):
            breakdown(tmp_path, ("batch_size=8",), answer=refuses(error))
    error = RefusedError("model.variant", "d", "the chosen model has no such setting; leave it out")
    assert explained(error, ("model=resnet",), (), ("model.variant",)) == (
        "model.variant=d: the chosen model has no such setting (a setting of this recipe, which model=resnet does not "
        "go with)"
    )
