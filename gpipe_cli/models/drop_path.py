"""Scheduled drop-path, the regulariser of the ImageNet run (Section 4), as in the TPU reference.

Whole results of an operation are dropped, separately for each example, more often as the training goes on.
"""

from torch import Tensor, nn


class ScheduledDropPath(nn.Module):
    """Sets the result of an operation to zero for some examples and scales up the rest, (N, C, H, W) -> the same.

    The probability to keep an example is `1 - progress * drop_probability`. In evaluation, and as long as everything is
    kept, the input is returned as it is and no random number is drawn.
    """

    def __init__(self, drop_probability: float) -> None:
        super().__init__()
        assert 0 <= drop_probability < 1, drop_probability
        self.drop_probability = drop_probability  # at the end of the training
        self.progress = 0.0  # share of all training steps that is done; `set_progress` sets it

    def forward(self, x: Tensor) -> Tensor:
        keep = 1 - self.progress * self.drop_probability
        if not self.training or keep == 1:
            return x
        mask = x.new_empty((len(x), 1, 1, 1)).bernoulli_(keep).div_(keep)
        return x * mask


def set_progress(module: nn.Module, progress: float) -> None:
    """Set the share of all training steps that is done, 0 to 1, in every `ScheduledDropPath` of `module`."""
    assert 0 <= progress <= 1, progress
    for child in module.modules():
        if isinstance(child, ScheduledDropPath):
            child.progress = progress
