import torch

from gpipe_cli.pipeline.runtime.storage_bytes import Extents, extent_of, storage_of


def test_views_of_one_memory_count_once_and_as_far_as_they_reach() -> None:
    x = torch.zeros(10, 4)
    extents = Extents()
    extents.add([x[2:4], x[3:5].flatten(), x[2:5].t()])
    assert extents.bytes == 3 * 4 * 4
    extents.add([x])
    assert extents.bytes == 10 * 4 * 4


def test_what_is_stretched_takes_the_memory_that_it_has() -> None:
    extent = extent_of(torch.zeros(3, 1, dtype=torch.float64).expand(3, 100))
    assert extent.bytes == 3 * 8


def test_what_is_left_out_does_not_count() -> None:
    weight, x, nothing = torch.zeros(5, 5), torch.zeros(7), torch.zeros(3, 0)
    extents = Extents(without={storage_of(weight)})
    extents.add([weight.t(), x, nothing])
    assert extents.bytes == 7 * 4


def test_pieces_of_one_memory_meet_where_they_overlap() -> None:
    x = torch.zeros(10)
    extents = Extents()
    extents.add([x[2:5]])
    assert extents.meets(extent_of(x[4:]))
    assert not extents.meets(extent_of(x[5:]))
    assert not extents.meets(extent_of(torch.zeros(10)))


def test_shapes_without_memory_have_extents_too() -> None:
    x = torch.zeros(10, 4, device="meta")
    assert extent_of(x[1:]).meets(extent_of(x.detach()))
    assert extent_of(x[1:3]).bytes == 32
    assert not extent_of(x).meets(extent_of(torch.zeros(10, 4, device="meta")))
