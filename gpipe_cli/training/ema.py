"""A moving average of the weights and of batch norm's statistics, to evaluate on (TPU code: 0.9999).

Each stage averages what it owns, after the optimizer and after batch norm's commit; nothing crosses stages.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """Averages every floating-point parameter and buffer of `module`, kept under its global name.

    Like TensorFlow's `ExponentialMovingAverage(decay, num_updates)`: after n updates the decay is
    min(decay, (1 + n) / (10 + n)), so that the first steps are forgotten quickly.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay, self.updates = decay, 0
        self._live = {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
        self.average = {name: tensor.clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        if not self._live:  # a stage of activations and pools
            return
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.average.values()), list(self._live.values()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module has the averages; afterwards its own values again, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in self._live.items():
            kept = tensor.clone()
            tensor.copy_(self.average[name])
            self.average[name] = kept
