"""Which GPUs are this process's own."""

import pytest

from gpipe_cli.system.gpus import visible

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2, 0", [2, 0]),
        ("1,7,0", [1]),  # up to the first that there is not
        ("GPU-cc,GPU-aaaa", [2, 0]),
        ("GPU-aa", []),  # two begin so
        ("MIG-1234", ["MIG-1234"]),
    ],
)
def test_visible_devices(setting: str | None, found: list[int | str]) -> None:
    assert visible(setting, UUIDS) == found
