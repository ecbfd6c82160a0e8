"""What holds for tests of what is reported."""

import pytest


@pytest.fixture(autouse=True)
def pictures_are_not_drawn() -> None:
    """The tests in this folder look at pictures, so they are drawn."""
