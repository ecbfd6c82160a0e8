"""A moving average of the weights and of batch norm's statistics, to evaluate on (TPU code: 0.9999).

Each stage averages what it owns, after the optimizer and after batch norm's commit; nothing crosses stages.

Departs from the reference: it averages running statistics, which are averages themselves and lag 1 / momentum steps
behind the weights. In the reference's epochs of thousands of steps that hardly matters. Where an epoch has 45 steps the
statistics no longer fit the weights: the default training then had top-1 10.3 % and a loss of 260, in place of 50.6 %.
Here each mini-batch's own statistics are averaged, so that they lag as much as the weights do.
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
        names: dict[torch.Tensor, list[str]] = {}  # layers may share a tensor, which then has several
        for name, tensor in module.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                names.setdefault(tensor, []).append(name)
        self._live = [(tuple(own), tensor) for tensor, own in names.items()]
        self.average: dict[str, torch.Tensor] = {}
        for own, tensor in self._live:
            self.average |= dict.fromkeys(own, tensor.detach().clone())

    @torch.no_grad()
    def update(self, statistics: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Follow the weights. `statistics`: buffers of the module, and what is averaged in place of their values."""
        self.updates += 1
        if not self._live:  # a stage of activations and pools
            return
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        instead = {id(buffer): value for buffer, value in statistics}
        averages = [self.average[own[0]] for own, _ in self._live]
        torch._foreach_lerp_(averages, [instead.get(id(tensor), tensor) for _, tensor in self._live], 1 - decay)

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
        for own, tensor in self._live:
            kept = tensor.clone()
            tensor.copy_(self.average[own[0]])
            self.average |= dict.fromkeys(own, kept)
