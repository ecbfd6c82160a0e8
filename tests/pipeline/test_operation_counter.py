from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from gpipe_cli.pipeline.memory_extents import Extents
from gpipe_cli.pipeline.operation_counter import KernelsOfCpu, OperationCounter


def test_views_are_no_operations() -> None:
    x = torch.empty(3, 4, device="meta")
    with OperationCounter() as counter:
        y = (x.t() @ x).view(16)[2:].relu() + 1
        torch.empty_like(y)
    assert counter.operations == 3, "product, relu, sum"
    assert counter.flops == 2 * 4 * 3 * 4
    # each reads and writes: the product 12 + 12 and 16, the others 14 and 14
    assert counter.moved_bytes == 4 * (12 + 12 + 16 + 14 + 14 + 14 + 14)


def attention(device: str, mask: bool, causal: bool, dropout: float, width: int = 16) -> int:
    """Bytes that attention saves for its backward."""
    query, key = (torch.rand(2, 4, 8, width, device=device, requires_grad=True) for _ in range(2))
    value = torch.rand(2, 4, 8, 16, device=device, requires_grad=True)
    seen = torch.ones(2, 1, 1, 8, dtype=torch.bool, device=device) if mask else None
    saved = Extents()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        saved.add((tensor,))
        return kept[-1]

    with saved_tensors_hooks(keep, lambda tensor: tensor), KernelsOfCpu():
        F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, is_causal=causal)
    return saved.bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("mask", "causal"), [(False, False), (False, True), (True, False)])
def test_attention_keeps_what_it_keeps_on_a_cpu(mask: bool, causal: bool, dropout: float) -> None:
    assert attention("meta", mask, causal, dropout) == attention("cpu", mask, causal, dropout)


def test_attention_of_other_widths_is_taken_apart_as_on_a_cpu() -> None:
    assert attention("meta", False, False, 0.0, width=8) == attention("cpu", False, False, 0.0, width=8)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_what_it_keeps_on_a_cpu(training: bool) -> None:
    found = []
    for device in ("meta", "cpu"):
        norm = nn.BatchNorm2d(5).to(device).train(training)
        shapes: list[tuple[int, ...]] = []

        def keep(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.detach()

        counter = OperationCounter() if device == "meta" else nullcontext()
        with saved_tensors_hooks(keep, lambda tensor: tensor), counter:
            norm(torch.ones(2, 5, 3, 3, device=device, requires_grad=True))
        found.append(shapes)
    assert found[0] == found[1]
