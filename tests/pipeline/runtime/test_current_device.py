"""Several GPUs in one process, imitated: kernels that layers launch themselves (Triton's) go to the current device."""

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from engine_runs import SumOfSquares
from training_runs import SMALL, configure, spec_of
from vector_clocks import World

from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.training.engine import build_engine
from gpipe_cli.training.step import PendingMetrics, update_weights


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the first layer, whose input needs none
@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", "always"), ("zero_bubble", "never")])
def test_a_stage_works_on_its_device(schedule: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, their backward and the optimizer ask for the current device, in a process that has two."""
    world = World()
    settings = [
        *SMALL,
        "executor=in_process",
        "partitions=2",
        f"schedule={schedule}",
        f"recompute={recompute}",
        "graphs=false",
        "ema_decay=0.9",
    ]
    config = configure(*settings)
    spec = spec_of(config).on((("cpu:0", "cpu:1"),))
    world.install(monkeypatch)
    engine = build_engine(config, spec, ControlGroup(0, 1))
    seen: dict[tuple[int, str], set[int]] = defaultdict(set)

    def ask(stage: int, what: str) -> Callable[..., None]:
        return lambda *given: seen[stage, what].add(world.here.device)

    for k, stage in engine.stages.items():
        for layer in stage.module.children():
            layer.register_forward_hook(ask(k, "forward"))
            layer.register_full_backward_hook(ask(k, "backward"))
        optimizer = engine.optimizers[k]
        assert optimizer is not None
        optimizer.register_step_post_hook(ask(k, "optimizer"))
        monkeypatch.setattr(engine.averages[k], "update", ask(k, "average"))
    timings = engine.executor.run(spec.schedule(3), 0, (3, 3, 2), (torch.randn(8, 3, 16, 16),), SumOfSquares())
    update_weights(engine, PendingMetrics(timings, {}, None, torch.zeros(0), torch.Tensor), 0.1)
    assert seen == {(k, what): {k} for k in (0, 1) for what in ("forward", "backward", "optimizer", "average")}
    assert world.here.device == 0
