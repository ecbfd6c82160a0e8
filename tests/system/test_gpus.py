"""Which GPUs are this process's own, and which data sheet is theirs."""

import pytest

from gpipe_cli.planner.data_sheet import data_sheet_of
from gpipe_cli.system.gpus import Gpu, visible_gpus

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (None, [0, 1, 2]),
        ("-1", []),
        ("2, 0", [2, 0]),
        ("1,7,0", [1]),  # up to the first that there is not
        ("GPU-cc,GPU-aaaa", [2, 0]),
        ("MIG-1234", ["MIG-1234"]),
    ],
)
def test_visible_devices(setting: str | None, found: list[int | str]) -> None:
    assert visible_gpus(setting, UUIDS) == found


@pytest.mark.parametrize(
    ("name", "gib", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA H100 PCIe", 80, None),  # slower than the one above in everything
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, None),
        ("Tesla V100-SXM2-16GB", 16, "v100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
    ],
)
def test_a_data_sheet_is_of_one_product(name: str, gib: int, sheet: str | None) -> None:
    assert data_sheet_of(Gpu(name, gib * 2**30)) == sheet
