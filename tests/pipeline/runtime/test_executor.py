"""How the executor fails and what it tells; that it computes the right thing is in test_laws.py."""

from collections import OrderedDict

import pytest
import torch
from engine_runs import CPU, SumOfSquares, local_transport
from torch import nn

from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.runtime.executor import ActionFailedError, Executor
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.named_schedules import build
from gpipe_cli.schedule.schedule import Action, Kind

FEATURES = (BoundaryTensor((0, 6), (1, 0), torch.float32, True),)
SIZES = (3, 2, 2)


class Trap(nn.Module):
    """Fails in the forward or in the backward, at its call number `at`."""

    def __init__(self, kind: Kind, at: int) -> None:
        super().__init__()
        self.kind, self.at, self.calls = kind, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            if self.kind is not Kind.B:
                raise ArithmeticError("it snapped")
            x = x * 1
            x.register_hook(lambda gradient: gradient.reshape(99))
        return x


def make(trap: nn.Module) -> tuple[Executor, list[Action]]:
    torch.manual_seed(0)
    modules = [
        nn.Sequential(OrderedDict(first=nn.Linear(4, 6))),
        nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(6), wide=nn.Linear(6, 9), middle=trap)),
        nn.Sequential(OrderedDict(last=nn.Linear(9, 1))),
    ]
    stages = {
        k: Stage(k, module, first_layer=2 * k, inputs=FEATURES if k else (), device=CPU, run_seed=0)
        for k, module in enumerate(modules)
    }
    watched: list[Action] = []
    return Executor(stages, range(3), local_transport(stages), lambda action, *_: watched.append(action)), watched


@pytest.mark.parametrize(
    ("kind", "at", "action", "shape"),
    [(Kind.F, 2, "1F1", "input (2, 9)"), (Kind.R, 4, "1R2", "input (2, 9)"), (Kind.B, 3, "1B2", "gradient (2, 9)")],
)
def test_a_failing_layer_is_told_with_its_action_and_shapes(kind: Kind, at: int, action: str, shape: str) -> None:
    """What the layer was given, not what came over the boundary of its stage: (2, 6)."""
    executor, watched = make(Trap(kind, at))
    recompute = "always" if kind is Kind.R else "never"
    schedule = build("gpipe", 3, 3, recompute)
    with pytest.raises(ActionFailedError) as caught:
        executor.run(schedule, 0, SIZES, (torch.ones(7, 4),), SumOfSquares())
    assert str(caught.value).startswith(f"{action} failed (stage 1")
    assert shape in str(caught.value)
    assert str(caught.value.action) == action == str(watched[-1])
    if kind is not Kind.B:
        assert "layer middle" in str(caught.value)
        assert str(caught.value).endswith("ArithmeticError: it snapped")
        assert isinstance(caught.value.__cause__, ArithmeticError)
