"""Models as a user writes them, for `model.target=custom_models:...`."""

import torch
from torch import nn


class Shift(nn.Module):
    """Owns a parameter whose initial value is set in the constructor and nowhere else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def small(width: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        Shift(width),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
    )
