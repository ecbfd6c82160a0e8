"""What a pipeline asks of every network: layers that train, leave their inputs alone, and initialise themselves."""

from functools import partial

import pytest
import torch
from networks import KINDS, sentences, small_amoebanet, small_transformer
from torch import Tensor

from gpipe_cli.pipeline.runtime.randomness import materialize

IMAGES = {"b 15": ("b", 15), "b 32": ("b", 32), "d 97": ("d", 97)}
NETWORKS = {
    **{
        name: (
            partial(small_amoebanet, variant=variant, image_size=size, auxiliary_head=True),
            lambda size=size: (torch.randn(3, 3, size, size),),
        )
        for name, (variant, size) in IMAGES.items()
    },
    **{kind: (partial(small_transformer, kind, dropout=0.3), partial(sentences, kind)) for kind in KINDS},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_reach_every_parameter_and_layers_leave_their_inputs_alone(name: str) -> None:
    build, inputs = NETWORKS[name]
    model, values = build(), inputs()
    for path, layer in model.named_children():
        copies = [tensor.detach().clone() for tensor in values]
        result = layer(values if len(values) > 1 else values[0])
        assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True)), path
        values = result if isinstance(result, tuple) else (result,)
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
            model = NETWORKS[name][0]()
        layers = materialize(model, first, len(model) - first, run_seed=3, device=torch.device("cpu"))
        return layers.state_dict()

    whole = real(0)
    torch.rand(17)  # what was drawn before does not matter
    later = real(2)
    assert all(tensor.isfinite().all() for tensor in whole.values())
    assert all(torch.equal(tensor, whole[path]) for path, tensor in later.items())
    assert 0 < len(later) < len(whole)
