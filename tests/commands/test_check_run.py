"""What `gpipe check` is made of: layers are watched, and bits are compared."""

import math
import random
from pathlib import Path

import custom_models
import pytest
import torch
from custom_models import with_layers
from engine_runs import SumOfSquares, local_transport
from torch import nn
from torch.nn.utils import parametrizations
from training_runs import TINY, assert_same_tensors, configure, final_tensors, of_type, train_here

from gpipe_cli.pipeline.profile.layer_probes import checking_repeatability
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.named_schedules import build
from gpipe_cli.training.events import TrainingReady
from gpipe_cli.verify.self_check import Variant, tolerance_row

CUSTOM = ["model=custom", "dataset.image_size=8", *TINY[2:3], *TINY[4:]]
CPU = torch.device("cpu")


def refused(model: nn.Sequential, replicas: int = 1) -> list[str]:
    """What is said of its layers, which run a micro-batch and run it again."""
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    stage = Stage(0, model, first_layer=0, inputs=(), device=CPU, run_seed=0)
    executor = Executor({0: stage}, [0], local_transport({0: stage}))
    with checking_repeatability([stage], replicas) as found:
        executor.run(build("gpipe", 1, 1, "always"), 0, (3,), (images,), SumOfSquares())
    return found


class Recurrent(nn.Module):
    """Torch has another LSTM where gradients are not recorded, on CPUs that can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(x.flatten(2).transpose(1, 2))[0]
        return outputs.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (custom_models.halves_unseen(), "changes its input in place"),
        (custom_models.draws_elsewhere("random"), "draws from Python's random module"),
        (custom_models.draws_elsewhere("generator"), "gives other values"),
        (with_layers(custom_models.Remembers()), "gives other values"),
        (with_layers(custom_models.Tracking(inplace=False)), "changes its own seen when it is run, by another tensor"),
        (with_layers(custom_models.Tracking(persistent=False)), "changes its own seen when it is run, which no"),
    ],
)
def test_a_layer_that_no_recomputation_can_repeat_is_refused(model: nn.Sequential, words: str) -> None:
    assert refused(model)[0].startswith(f"layer 1 {words}")


def test_replicas_would_change_buffers_by_other_samples() -> None:
    complaint, *_ = refused(with_layers(parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))), replicas=2)
    assert complaint.startswith("layer 1 changes its own parametrizations")
    assert "use replicas=1" in complaint


def test_layers_that_can_are_left_alone() -> None:
    """Also by being watched: weights, statistics, what they remember, gradients and generators are as before."""
    caches, counts, conv = custom_models.Caches(), custom_models.CountsCalls(), nn.Conv2d(4, 4, 1)
    caches.register_buffer("stretched", torch.ones(1).expand(4))
    model = with_layers(
        caches, counts, nn.BatchNorm2d(4), nn.Dropout(0.3), conv, custom_models.Holds(conv),
        parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
        Recurrent(), custom_models.Tracking(),
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    assert refused(model) == []
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert caches.calls == counts.calls == 0


@pytest.mark.parametrize(("model", "layer"), [("scales_in_place", "1"), ("changes_a_mask", "2")])
def test_a_training_refuses_a_layer_that_changes_its_input(model: str, layer: str, tmp_path: Path) -> None:
    """A mask that needs no gradient was halved in place just behind a cut: recomputed from what was left of it, the
    gradients were others, and nothing said so. Some of it can be seen on the meta device, the rest at the first F."""
    settings = [f"model.target=custom_models:{model}", "partitions=2", "executor=in_process"]
    balance = [f"partition.balance=[{layer},{4 if layer == '1' else 5}]"]
    with pytest.raises(ChangedInputError, match=f"layer {layer} changes its input in place") as refused:
        train_here(configure(*CUSTOM, *settings, *balance, "check_layers=false", "recompute=always"), tmp_path)
    assert "\n" not in str(refused.value)


def test_watching_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    """Of one that goes on neither: it is watched again, since its code may be another."""
    settings = [*CUSTOM, "model.target=custom_models:odd", "executor=in_process", "partitions=3", "epochs=2"]
    settings += ["ema_decay=0.9", "data_workers=1"]
    train_here(configure(*settings, "check_layers=false"), tmp_path / "not_watched")
    heard = train_here(configure(*settings, "max_steps=4"), tmp_path / "begun")
    assert [label for label, _ in of_type(heard, TrainingReady)[0].notes] == ["layers"]
    heard = train_here(configure(*settings, f"resume={tmp_path / 'begun'}"), tmp_path / "watched")
    assert [label for label, _ in of_type(heard, TrainingReady)[0].notes] == ["layers"]
    assert_same_tensors(final_tensors(tmp_path / "watched"), final_tensors(tmp_path / "not_watched"))


def test_another_order_of_sums_has_a_tolerance() -> None:
    rows = [
        tolerance_row(Variant(1, 3, "1f1b", "never", "in_process"), d, 1e-5) for d in (0.0, 3.1e-7, 1.1e-5, math.nan)
    ]
    assert [row.verdict for row in rows] == ["identical", "within tolerance", "differs", "differs"]
    assert rows[-1].difference is None  # JSON has no such number
