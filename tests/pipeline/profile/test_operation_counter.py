import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_cli.pipeline.profile.layer_cost import OperationKind, Operations
from gpipe_cli.pipeline.profile.operation_counter import AttentionKernels, OperationCounter, cpu_fuses
from gpipe_cli.pipeline.runtime.saved_activations import StorageBytes, counting_saved


def test_views_are_no_operations() -> None:
    """Torch 2.15 views what a linear map returns by an operation that is not marked as a view: it once cost time."""
    x = torch.empty(3, 4, device="meta")
    with OperationCounter() as counter:
        y = torch.ops.aten._unsafe_view((x.t() @ x).view(16)[2:], (2, 7)).relu() + 1
        torch.empty_like(y)
    # each reads and writes: the product 12 + 12 and 16, the relu and the sum 14 and 14
    assert counter.by_kind == {
        OperationKind.PRODUCT: Operations(1, 2 * 4 * 3 * 4, 4 * (12 + 12 + 16)),
        OperationKind.ELEMENTWISE: Operations(2, 0, 4 * (14 + 14 + 14 + 14)),
    }


def test_each_kind_of_layer_is_counted_as_its_kind() -> None:
    """Forwards and backwards: what follows from it is the time that a device is said to take."""
    kinds = OperationKind
    for layer, kind in (
        (nn.Conv2d(32, 16, 3, bias=False), kinds.CONVOLUTION),
        (nn.Conv2d(32, 15, 3, bias=False), kinds.NARROW),
        (nn.Conv2d(32, 32, 3, groups=32, bias=False), kinds.DEPTHWISE),
        (nn.Conv2d(32, 32, 3, groups=2, bias=False), kinds.CONVOLUTION),
        (nn.Conv2d(32, 32, 3, groups=4, bias=False), kinds.NARROW),
        (nn.BatchNorm2d(32), kinds.NORMALIZATION),
        (nn.GroupNorm(2, 32), kinds.NORMALIZATION),
        (nn.LayerNorm(8), kinds.NORMALIZATION),
        (nn.MaxPool2d(2), kinds.POOLING),
        (nn.AvgPool2d(2), kinds.POOLING),
        (nn.Linear(8, 8, bias=False), kinds.PRODUCT),
        (nn.Dropout(0.5), kinds.RANDOM),
        (nn.GELU(), kinds.ELEMENTWISE),
    ):
        x = torch.empty(2, 32, 8, 8, device="meta", requires_grad=True)
        for work in (lambda: layer.to("meta")(x), lambda: torch.autograd.grad(y.sum(), x)):  # noqa: B023
            with OperationCounter() as counter:
                y = work()
            if kind is not kinds.RANDOM or isinstance(y, Tensor):  # the backward of a dropout is a multiplication
                assert kind in counter.by_kind, layer


def attention(device: str, mask: bool, dropout: float, width: int) -> int:
    """Bytes that attention saves for its backward."""
    query, key = (torch.rand(2, 4, 8, width, device=device, requires_grad=True) for _ in range(2))
    value = torch.rand(2, 4, 8, 16, device=device, requires_grad=True)
    seen = torch.ones(2, 1, 1, 8, dtype=torch.bool, device=device) if mask else None
    saved = StorageBytes()
    with counting_saved(saved), AttentionKernels(cpu_fuses):
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)
    assert mixed.requires_grad  # and alive, with all that is saved for its backward
    return saved.bytes


@pytest.mark.parametrize(("mask", "dropout", "width"), [(False, 0.1, 16), (True, 0.1, 16), (False, 0.0, 8)])
def test_attention_keeps_what_it_keeps_on_a_cpu(mask: bool, dropout: float, width: int) -> None:
    """Also where it is decomposed: for other widths of the values."""
    assert attention("meta", mask, dropout, width) == attention("cpu", mask, dropout, width)
