"""A moving average of the weights and of batch norm's statistics, to evaluate on (TPU code: 0.9999).

Each stage averages what it owns, after the optimizer and after batch norm's commit; nothing crosses stages.

Departs from the reference: it averages running statistics, which are averages themselves and lag 1 / momentum steps
behind the weights. Over the reference's epochs of thousands of steps that is nothing. Where an epoch has 45 steps the
statistics are then those of other weights: with weights that had top-1 50.6 % after it, the default training had 10.3 %
and a loss of 260. Here each mini-batch's own statistics are averaged, so that they lag as much as the weights do.
"""

from collections.abc import Iterable, Iterator
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
        self._names = {id(buffer): name for name, buffer in module.named_buffers()}
        self.average = {name: tensor.clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self, statistics: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Follow the weights. `statistics`: buffers of the module, and what is averaged in place of their values."""
        self.updates += 1
        if not self._live:  # a stage of activations and pools
            return
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        newest = self._live | {self._names[id(buffer)]: value for buffer, value in statistics}
        torch._foreach_lerp_(list(self.average.values()), list(newest.values()), 1 - decay)

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
