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


class Recurrent(nn.Module):
    """Returns a tensor and a tuple of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> object:
        return self.lstm(x.flatten(1, 2))


class LookUp(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {}["x"]  # type: ignore[no-any-return]


def reads_values() -> nn.Sequential:
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Flatten(), nn.LazyLinear(10))


def returns_nested() -> nn.Sequential:
    return nn.Sequential(Recurrent(), nn.Flatten(), nn.Linear(4, 10))


def looks_up() -> nn.Sequential:
    return nn.Sequential(LookUp(2, 2))


def has_nothing() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.ReLU())


class Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> object:  # type: ignore[override]
        return {"x": super().forward(x)}


def returns_names() -> nn.Sequential:
    return nn.Sequential(Named(24, 2))
