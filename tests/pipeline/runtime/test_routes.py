"""What skips cost to send: straight to the stage that takes them up, or through all stages between."""

import torch

from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.runtime.routes import forward_bytes


def tensor(channels: int, skip: str = "") -> BoundaryTensor:
    return BoundaryTensor((0, channels), (1, 0), torch.float32, has_gradient=True, skip=skip)


def test_a_skip_is_sent_once_and_not_once_for_each_stage_between() -> None:
    """`far` leads from stage 0 to 3, `near` from 1 to 2; what the next layer gets has 1, 2 and 3 channels."""
    far, near = tensor(10, "far"), tensor(100, "near")
    boundaries = [(tensor(1), far), (tensor(2), far, near), (tensor(3), far)]
    straight, through = forward_bytes(boundaries, samples=5)
    assert straight == 4 * 5 * (1 + 2 + 3 + 10 + 100)
    assert through == straight + 4 * 5 * 2 * 10
