"""What is known of torch's layers holds: a layer that is wrongly known would silently give other bits."""

import itertools

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline.runtime import known_layers
from gpipe_cli.pipeline.runtime.boundary import in_layout
from gpipe_cli.pipeline.runtime.known_layers import draws_nothing, layers_of, returns_dense_gradients

SIZES = [(), (1,), (4,), (3, 1), (1, 5), (3, 4)]  # of the dimensions between the first and the last


def made(kind: type[nn.Module], width: int) -> nn.Module:
    return kind(width, 6) if kind is nn.Linear else kind(width) if kind is nn.LayerNorm else kind()


@pytest.mark.parametrize("kind", sorted(known_layers._RETURN_DENSE_GRADIENTS, key=lambda kind: kind.__name__))
def test_outputs_and_gradients_of_known_layers_are_dense(kind: type[nn.Module]) -> None:
    for samples, between, width in itertools.product((1, 2, 7), SIZES, (1, 5)):
        if len(between) == 2:
            continue  # four dimensions
        given = in_layout(torch.randn(samples, *between, width), torch.contiguous_format).requires_grad_()
        seen: list[torch.Tensor] = []
        handed = given * 1
        handed.register_hook(seen.append)
        version = handed._version
        outputs = made(kind, width)(handed)
        assert in_layout(outputs.detach(), torch.contiguous_format).stride() == outputs.stride()
        assert outputs.storage_offset() == 0
        assert outputs.untyped_storage()._cdata != handed.untyped_storage()._cdata
        assert (handed._version, outputs.dim()) == (version, handed.dim())
        outputs.backward(torch.randn_like(outputs))
        assert in_layout(seen[0], torch.contiguous_format) is seen[0], (samples, between, width)


def test_a_layer_that_changes_its_input_is_not_plain() -> None:
    stage = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2), nn.Dropout(), nn.Identity())
    assert [layer.is_plain for layer in layers_of(stage)] == [True, False, False, False, False]


def test_the_compiler_may_choose_the_strides_of_gradients() -> None:
    stage = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout())
    known = [[layer.has_dense_gradient for layer in layers_of(stage, compiled=compiled)] for compiled in (False, True)]
    assert known == [[True, False, False], [False] * 3]


def test_layers_draw_unless_nothing_in_them_can() -> None:
    state = torch.get_rng_state()
    images, tokens = torch.ones(2, 4, 8, 8), torch.ones(2, 4, dtype=torch.long)
    plain = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(),
    )  # fmt: skip
    embedding = nn.Embedding(3, 4)
    torch.set_rng_state(state)
    plain(images), embedding(tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert draws_nothing(plain)
    assert draws_nothing(embedding)
    hooked, changed = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda layer, inputs, outputs: outputs * torch.rand(()))
    changed.forward = lambda x: x * torch.rand(())  # type: ignore[method-assign]
    for layer in (nn.Dropout(0.0), nn.Sequential(nn.RReLU(), nn.ReLU()), hooked, changed, nn.LSTM(2, 2)):
        assert not draws_nothing(layer)
        assert not returns_dense_gradients(layer)
