"""What the values say; how they come about is tested in `test_tracing.py`."""

import torch

from gpipe_cli.pipeline.profile.layer_cost import LayerCost, OperationKind, Operations, Saved, Work
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor, as_boundary


def test_a_shape_follows_samples_and_lengths() -> None:
    tensor = BoundaryTensor((1, 0, 6), (2, 0, 0), torch.float16, True, ((0, 1, 0), (0, 3, 0)))
    assert tensor.shape(5, (4, 2)) == (11, 10, 6)
    assert tensor.bytes(5, (4, 2)) == 11 * 10 * 6 * 2


def test_examples_vary_in_their_first_dimension_only() -> None:
    images, ids = as_boundary((torch.empty(1, 3, 8, 8), torch.zeros(1, 7, dtype=torch.int64)))
    assert images.shape(4) == (4, 3, 8, 8)
    assert ids.bytes(2) == 2 * 7 * 8
    assert not images.has_gradient


def test_work_is_flops_and_moved_bytes_forward_and_backward() -> None:
    product, other = Operations(2, 100.0, 8.0, 40.0), Operations(3, 0.0, 5.0)
    forward = Work({OperationKind.PRODUCT: product, OperationKind.ELEMENTWISE: other})
    cost = LayerCost("a", 7, forward, Work({OperationKind.PRODUCT: Operations(4, 200.0)}), ())
    assert (forward.operations, forward.flops, forward.bytes) == (5, 100, 13)
    assert cost.flops == 300
    assert cost.saved == Saved()


def test_what_is_saved_inside_grows_with_samples() -> None:
    assert Saved(base_bytes=10, per_sample_bytes=3).inside_bytes(4) == 22
