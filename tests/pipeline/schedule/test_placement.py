"""Placements: the tables of the literature, and what holds for any number of stages and devices."""

import itertools

import pytest

from gpipe_cli.pipeline.schedule.placement import PLACEMENTS, place


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


def test_every_device_has_a_stage_and_in_a_v_neighbours_are_on_neighbouring_devices() -> None:
    for name, stages in itertools.product(PLACEMENTS, range(1, 13)):
        for devices in range(1, stages + 1):
            placed = place(name, stages, devices)
            assert set(placed) == set(range(devices))
            assert len(placed) == stages
            if name == "v" and stages >= 2 * devices:
                assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(placed))
