"""Drop path (Larsson et al., 2017), whose probability grows during training, as in NASNet (Zoph et al., 2018)."""

from torch import Tensor, nn


class ScheduledDropPath(nn.Module):
    """Sets the result of an operation to zero for some examples and scales up the rest, (N, C, H, W) -> the same.

    The probability of keeping an example is `1 - progress * drop_probability`; if it is 1, nothing is drawn.
    """

    def __init__(self, drop_probability: float) -> None:
        super().__init__()
        self.drop_probability = drop_probability  # at the end of the training
        self.progress = 0.0  # fraction of all training steps that are done; see `set_progress`

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_probability == 0:  # compiled code then does not depend on the progress
            return x
        keep = 1 - self.progress * self.drop_probability
        if keep == 1:
            return x
        mask = x.new_empty((len(x), 1, 1, 1)).bernoulli_(keep).div_(keep)
        return x * mask


def set_progress(module: nn.Module, progress: float) -> None:
    """Set the fraction of all training steps that are done, 0 to 1, in every `ScheduledDropPath` of `module`."""
    for child in module.modules():
        if isinstance(child, ScheduledDropPath) and child.drop_probability:
            child.progress = progress
