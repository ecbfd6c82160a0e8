"""What a pipeline asks of every network: layers that train, leave their inputs alone, and initialise themselves."""

import pytest
import torch
from networks import KINDS, sentences, small_amoebanet, small_transformer
from torch import Tensor, nn

from gpipe_cli.pipeline.runtime.boundary import as_tuple, as_value
from gpipe_cli.pipeline.runtime.initial_weights import materialize

IMAGES = {"b 15": ("b", 15), "b 32": ("b", 32), "d 97": ("d", 97)}


def build(name: str) -> nn.Sequential:
    if name in KINDS:
        return small_transformer(name, dropout=0.3)
    variant, size = IMAGES[name]
    return small_amoebanet(variant=variant, image_size=size, auxiliary_head=True)


@pytest.mark.parametrize("name", [*IMAGES, *KINDS])
def test_gradients_reach_every_parameter_and_layers_leave_their_inputs_alone(name: str) -> None:
    model = build(name)
    values = sentences(name) if name in KINDS else (torch.randn(3, 3, IMAGES[name][1], IMAGES[name][1]),)
    for path, layer in model.named_children():
        copies = [tensor.detach().clone() for tensor in values]
        result = as_tuple(layer(as_value(values)))
        assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True)), path
        values = result
    torch.stack([each.square().sum() for each in values]).sum().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        # A bias of the keys shifts all scores of a query alike: only rounding gives it a gradient.
        assert parameter.grad.any() or path.endswith("key.bias"), path


@pytest.mark.parametrize("name", ["b 32", "d 97", *KINDS])
def test_layers_initialise_themselves(name: str) -> None:
    """Built without memory, each layer initialised by itself: every value is set, wherever the first cut lies."""

    def real(first: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = build(name)
        layers = materialize(model, first, len(model) - first, run_seed=3, device=torch.device("cpu"))
        return layers.state_dict()

    whole = real(0)
    torch.rand(17)  # what was drawn before does not matter
    later = real(2)
    assert all(tensor.isfinite().all() for tensor in whole.values())
    assert all(torch.equal(tensor, whole[path]) for path, tensor in later.items())
    assert 0 < len(later) < len(whole)
