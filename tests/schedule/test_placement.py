"""Placements: the tables of the literature."""

import pytest

from gpipe_cli.schedule.placement import place


@pytest.mark.parametrize(
    ("name", "stages", "devices", "expected"),
    [
        ("neighbours", 8, 4, "00112233"),
        ("looped", 8, 4, "01230123"),
        ("v", 8, 4, "01233210"),
        ("v", 12, 3, "012210012210"),
        ("v", 5, 3, "01210"),  # the last device has a single stage, and the first one the last stage all the same
        ("v", 4, 3, "0120"),
    ],
)
def test_stages_are_placed_as_published(name: str, stages: int, devices: int, expected: str) -> None:
    assert "".join(map(str, place(name, stages, devices))) == expected  # type: ignore[arg-type]
