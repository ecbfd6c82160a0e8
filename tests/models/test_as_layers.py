"""What a pipeline asks of every network: layers that train, leave their inputs alone, and initialise themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.models.transformer_nmt import transformer_nmt
from gpipe_cli.pipeline.runtime.materialize import materialize

VOCABULARY = 50
Values = tuple[Tensor, ...]


def images(variant: str, size: int) -> tuple[Callable[[], nn.Sequential], Callable[[], Values]]:
    def build() -> nn.Sequential:
        return amoebanet(
            variant=variant,  # type: ignore[arg-type]
            normal_cells=3,
            filters=16,
            image_size=size,
            num_classes=10,
            auxiliary_head=True,
            batch_norm_momentum=0.1,
        )

    return build, lambda: (torch.randn(3, 3, size, size),)


def language_model() -> nn.Sequential:
    return transformer_lm(layers=3, width=16, hidden=32, heads=4, vocabulary=VOCABULARY, length=12)


def translator(shared: bool) -> nn.Sequential:
    return transformer_nmt(
        layers=2,
        width=16,
        hidden=32,
        heads=4,
        head_width=8,
        vocabulary=VOCABULARY,
        length=12,
        dropout=0.3,
        attention_dropout=0.3,
        depth_scaled=True,
        logit_clip=0.0,
        shared_embedding=shared,
    )


def sentences(*lengths: int) -> Values:
    """Batches of three sequences of tokens; where there are two batches, a source ends early."""
    batches = tuple(torch.randint(1, VOCABULARY, (3, length)) for length in lengths)
    for batch in batches[:-1]:
        batch[1, 6:] = 0
    return batches


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Values]]] = {
    "b 32": images("b", 32),
    "d 97": images("d", 97),
    "b 224": images("b", 224),
    "d 299": images("d", 299),
    "language model": (language_model, lambda: sentences(9)),
    "shared embedding": (lambda: translator(True), lambda: sentences(9, 8)),
    "separate embeddings": (lambda: translator(False), lambda: sentences(9, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_reach_every_parameter_and_layers_leave_their_inputs_alone(name: str) -> None:
    build, inputs = NETWORKS[name]
    torch.manual_seed(0)
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


@pytest.mark.parametrize("name", ["b 32", "d 97", "language model", "shared embedding", "separate embeddings"])
def test_layers_initialise_themselves(name: str) -> None:
    """Built without memory, each layer initialised by itself: every value is set, wherever the first cut lies."""

    def real(first: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = NETWORKS[name][0]()
        layers = materialize(model, first, len(model) - first, run_seed=3, device=torch.device("cpu"))
        return layers.state_dict()

    whole, later = real(0), real(2)
    assert all(tensor.isfinite().all() for tensor in whole.values())
    assert all(torch.equal(tensor, whole[path]) for path, tensor in later.items())
    assert 0 < len(later) < len(whole)
