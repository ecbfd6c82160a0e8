"""A model that behaves as it is told, for sweeps: `model.target=bench_models:odd model.arguments.way=...`."""

import os
import time
from pathlib import Path

import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self, way: str, until: str) -> None:
        super().__init__()
        self.way, self.until, self.calls = way, Path(until), 0
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "meta":
            return self.linear(x)
        self.calls += 1
        match self.way:
            case "hungry":
                torch.empty(10**15)
            case "held":  # micro-batches of two samples, after the first four of them, until there is a file
                while len(x) == 2 and self.calls > 4 and not self.until.exists():
                    time.sleep(0.02)
        return self.linear(x)


def odd(way: str = "fine", until: str = "") -> nn.Sequential:
    match way:
        case "wrong":
            raise ValueError("way=wrong: cannot be")
        case "exits":
            os._exit(7)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4), Odd(way, until))
