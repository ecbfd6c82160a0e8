"""Rates of a device: fitted to the seconds of layers, they give these back."""

import random

import pytest
import torch

from gpipe_cli.launch import reference_layers
from gpipe_cli.pipeline.profile.layer_cost import LayerCost, OperationKind
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import as_boundary
from gpipe_cli.planner.device_rates import COMPUTING, CONVOLUTIONS, Rates, fit_rates


@pytest.fixture(scope="module")
def costs() -> tuple[LayerCost, ...]:
    with torch.device("meta"):
        model = reference_layers.layers()
    image = torch.empty(1, 3, reference_layers.IMAGE_SIZE, reference_layers.IMAGE_SIZE, device="meta")
    return trace_layers(model, as_boundary((image,)), training=True)


def test_the_reference_layers_tell_all_rates_of_a_device(costs: tuple[LayerCost, ...]) -> None:
    """Seconds made of known rates lead back to these rates: no two of them stand for each other in all layers."""
    draw = random.Random(1)
    for _ in range(5):
        byte = {kind: draw.uniform(0.5, 2.0) * 1e-10 for kind in OperationKind}
        known = Rates(
            draw.uniform(0.5, 2.0) * 1e-5,
            {kind: draw.uniform(0.5, 2.0) * 1e-5 for kind in OperationKind},
            {kind: draw.uniform(0.5, 2.0) * 1e-11 for kind in COMPUTING},
            byte,
            dict.fromkeys(CONVOLUTIONS, 3e-10) | {OperationKind.PRODUCT: 5e-11},
        )
        works = [cost.forward for cost in costs]
        seconds = [known.seconds(work, reference_layers.SAMPLES) for work in works]
        found = fit_rates(works, seconds, reference_layers.SAMPLES)
        assert found.layer == pytest.approx(known.layer, rel=0.05)
        for table in ("operation", "flop", "byte", "weight_byte"):
            assert getattr(found, table) == pytest.approx(getattr(known, table), rel=0.05), table
