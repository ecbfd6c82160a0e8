"""Clipping by the global norm without reading it, against Python's own arithmetic."""

import pytest
import torch

from gpipe_cli.assembly.optimizer import clip_gradients, gradient_norms


@pytest.mark.parametrize("largest", [1e-3, 1.0, 3.0, 1e3])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.3, 1e4])
def test_gradients_are_scaled_as_by_a_number(scale: float, largest: float) -> None:
    """Bit by bit: norms added up one after another, and nothing changed where they are small enough."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(), (3,), *[(5, 7)] * 40, (2, 3, 4, 5)]
    gradients = [scale * torch.randn(shape, generator=generator) for shape in shapes]
    gradients.append(scale * torch.randn(4, generator=generator).double())
    total = 0.0
    for norm in gradient_norms(gradients).tolist():
        total += norm * norm
    norm = total**0.5
    expected = [gradient * (largest / norm) if norm > largest else gradient.clone() for gradient in gradients]
    clip_gradients(gradients, gradient_norms(gradients), largest)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
