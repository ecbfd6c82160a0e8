"""The genotypes against the TPU reference's tables, retyped here as `operation(state)` pairs."""

import pytest

from gpipe_cli.models.genotype import CellGenotype, Variant, genotype

NORMAL_B = """
    1x1(1) + max_pool_3x3(1)
    identity(1) + separable_3x3_2(0)
    1x1(1) + separable_3x3_2(0)
    1x1(2) + identity(2)
    avg_pool_3x3(1) + 1x1(5)
    output 0 3 4 6
"""
NORMAL_D = """
    1x1(1) + max_pool_3x3(1)
    identity(1) + 1x7_7x1(0)
    1x1(0) + 1x7_7x1(0)
    max_pool_3x3(2) + identity(2)
    avg_pool_3x3(1) + 1x1(5)
    output 0 3 4 6
"""
REDUCTION_B = """
    max_pool_2x2(0) + max_pool_3x3(0)
    identity(2) + 3x3(1)
    separable_5x5_2(2) + max_pool_3x3(2)
    identity(3) + separable_3x3_2(1)
    avg_pool_3x3(4) + 1x1(3)
    output 5 6
"""
REDUCTION_D = """
    max_pool_2x2(0) + max_pool_3x3(0)
    identity(2) + 3x3(1)
    1x7_7x1(2) + max_pool_3x3(2)
    identity(3) + max_pool_2x2(1)
    avg_pool_3x3(2) + 1x1(3)
    output 4 5 6
"""


def written(cell: CellGenotype) -> list[str]:
    pairs = [" + ".join(f"{name}({state})" for name, state in pair) for pair in cell.pairs]
    return [*pairs, "output " + " ".join(str(state) for state in cell.output)]


@pytest.mark.parametrize(
    ("variant", "normal", "reduction"), [("b", NORMAL_B, REDUCTION_B), ("d", NORMAL_D, REDUCTION_D)]
)
def test_tables(variant: Variant, normal: str, reduction: str) -> None:
    cells = genotype(variant)
    assert written(cells.normal) == [line.strip() for line in normal.strip().splitlines()]
    assert written(cells.reduction) == [line.strip() for line in reduction.strip().splitlines()]


@pytest.mark.parametrize("variant", ["b", "d"])
@pytest.mark.parametrize("kind", ["normal", "reduction"])
def test_no_state_is_read_early_or_lost(variant: Variant, kind: str) -> None:
    cell: CellGenotype = getattr(genotype(variant), kind)
    assert all(state < 2 + index for index, pair in enumerate(cell.pairs) for _, state in pair)
    read = {state for pair in cell.pairs for _, state in pair}
    assert set(range(2 + len(cell.pairs))) == read | set(cell.output)
