"""A cell is wired as the TPU reference's tables say, and its two inputs are treated as there."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.models.cell import NORMAL, REDUCTION, Cell, CellGenotype, FeatureMap, Variant
from gpipe_cli.models.drop_path import ScheduledDropPath, set_progress
from gpipe_cli.models.operations import AfterRelu, FactorizedReduction

CURRENT = FeatureMap(12, 7)
PREVIOUS = FeatureMap(8, 7)  # as many channels as a state, so it is state 1 as it is


def build(kind: CellGenotype, stride: int, previous: FeatureMap | None = PREVIOUS, drop_path: float = 0.0) -> Cell:
    shapes = {"current": CURRENT, "previous": previous}
    return Cell(kind, filters=8, stride=stride, norm=nn.BatchNorm2d, drop_path=drop_path, **shapes)  # type: ignore[arg-type]


def inputs(previous: FeatureMap) -> tuple[Tensor, Tensor]:
    return torch.randn(2, *CURRENT, CURRENT.size), torch.randn(2, *previous, previous.size)


def by_hand(cell: Cell, current: Tensor, previous: Tensor) -> Tensor:
    """The cell once more, every ReLU on its own."""
    states = [cell.current(F.relu(current)), cell.previous(previous)]
    operations = iter(cell.operations)
    for pair in cell.genotype.pairs:
        terms = []
        for (_, state), apply in zip(pair, operations, strict=False):
            terms.append(apply(F.relu(states[state]) if isinstance(apply, AfterRelu) else states[state]))
        states.append(terms[0] + terms[1])
    return torch.cat([states[index] for index in cell.genotype.output], dim=1)


@pytest.mark.parametrize(
    ("variant", "stride", "wiring", "output", "previous"),
    [
        ("b", 1, [(1, 1), (1, 0), (1, 0), (2, 2), (1, 5)], [0, 3, 4, 6], PREVIOUS),
        ("d", 1, [(1, 1), (1, 0), (0, 0), (2, 2), (1, 5)], [0, 3, 4, 6], FeatureMap(12, 7)),
        ("b", 2, [(0, 0), (2, 1), (2, 2), (3, 1), (4, 3)], [5, 6], FeatureMap(4, 14)),
        ("d", 2, [(0, 0), (2, 1), (2, 2), (3, 1), (2, 3)], [4, 5, 6], FeatureMap(4, 13)),
    ],
)
def test_wiring(
    variant: Variant, stride: int, wiring: list[tuple[int, int]], output: list[int], previous: FeatureMap
) -> None:
    genotype = (NORMAL if stride == 1 else REDUCTION)[variant]
    assert [tuple(state for _, state in pair) for pair in genotype.pairs] == wiring
    assert list(genotype.output) == output
    cell = build(genotype, stride, previous)
    x, skip = inputs(previous)
    logits = torch.randn(2, 10)  # of the auxiliary head
    result, current, passed_on = cell((x, skip, logits))
    assert current is x
    assert passed_on is logits
    assert result.shape == (2, cell.output.channels, cell.output.size, cell.output.size)
    assert cell.output == (8 * len(output), 7 if stride == 1 else 4)
    torch.testing.assert_close(result, by_hand(cell, x, skip))


def test_one_state_is_rectified_once() -> None:
    """D reads the rectified state 0 in three operations; autograd keeps one tensor for them."""
    cell = build(NORMAL["d"], 1)
    seen: list[int] = []
    for apply in cell.operations:
        if isinstance(apply, AfterRelu):
            apply.register_forward_pre_hook(lambda _, args: seen.append(args[0].data_ptr()))
    # Keep the graph alive, so that no address is used twice.
    result = cell(inputs(PREVIOUS))
    assert result[0].requires_grad
    # Readers of states 1, 0, 0, 0, 5: three states, so three tensors.
    assert len(seen) == 5
    assert len(set(seen)) == 3


def test_predecessor() -> None:
    kind = NORMAL["d"]
    assert isinstance(build(kind, 1, PREVIOUS).previous, nn.Identity)
    assert isinstance(build(kind, 1, FeatureMap(8, 14)).previous, FactorizedReduction)
    projection = build(kind, 1, FeatureMap(6, 7)).previous
    x = torch.randn(2, 6, 7, 7)
    torch.testing.assert_close(projection(x), projection(F.relu(x)), rtol=0, atol=0)


def test_first_cell_reads_the_stem_unprojected() -> None:
    cell = build(REDUCTION["d"], 2, previous=None)
    x = torch.randn(2, 12, 7, 7)
    result, current = cell(x)
    assert current is x
    assert isinstance(cell.previous, nn.Identity)
    torch.testing.assert_close(result, by_hand(cell, x, x), rtol=0, atol=0)


def test_drop_path_spares_identities_only() -> None:
    kind = NORMAL["b"]
    cell = build(kind, 1, drop_path=0.5)
    set_progress(cell, 1.0)
    dropped: list[Tensor] = []
    cell.drop_path.register_forward_pre_hook(lambda _, args: dropped.append(args[0]))
    results: list[Tensor] = []
    names = [name for pair in kind.pairs for name, _ in pair]
    for name, apply in zip(names, cell.operations, strict=True):
        if name != "identity":
            apply.register_forward_hook(lambda _, args, result: results.append(result))
    cell(inputs(PREVIOUS))
    assert len(dropped) == len(names) - 2  # the cell has two identities
    assert all(a is b for a, b in zip(dropped, results, strict=True))


def test_drop_path_removes_whole_examples_and_scales_the_rest() -> None:
    drop_path = ScheduledDropPath(0.4)
    drop_path.progress = 0.5  # keep = 1 - 0.5 * 0.4 = 0.8
    x = torch.ones(4000, 3, 2, 2, requires_grad=True)
    whole = drop_path(x)
    whole.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, whole.detach())  # the gradient has the same mask
    y = whole.detach().flatten(1)
    assert torch.equal(y, y[:, :1].expand(-1, 12)), "all channels and pixels of an example share one fate"
    dropped = y[:, 0] == 0
    torch.testing.assert_close(y[~dropped], torch.full_like(y[~dropped], 1 / 0.8))
    # Standard deviation of the mean: sqrt(0.8 * 0.2 / 4000) = 0.0063.
    assert dropped.float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert y.mean().item() == pytest.approx(1, abs=0.04)
