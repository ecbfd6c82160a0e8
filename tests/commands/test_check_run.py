"""What `gpipe check` is made of: layers are watched, and bits are compared."""

import contextlib
import math
import random
from collections.abc import Callable
from pathlib import Path

import custom_models
import pytest
import torch
from custom_models import with_layers
from engine_runs import SumOfSquares
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import _get_current_dispatch_mode
from training_runs import TINY, assert_same_tensors, configure, final_tensors, of_type, train_here

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.profile.layer_probes import Probed, _Seen, probing
from gpipe_cli.pipeline.runtime.executor import ActionFailedError, Executor
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.transport import LocalTransport
from gpipe_cli.pipeline.schedule.named_schedules import build
from gpipe_cli.training.events import TrainingReady
from gpipe_cli.verify.variants import Variant, within

CUSTOM = ["model=custom", "dataset.image_size=8", *TINY[2:3], *TINY[4:]]
CPU = torch.device("cpu")


def watched(model: nn.Sequential) -> Probed:
    """What its layers are seen to do with a micro-batch that is run, and run again."""
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    stage = Stage(0, model, first_layer=0, inputs=(), device=CPU, run_seed=0)
    executor = Executor({0: stage}, [0], LocalTransport([CPU]))
    with contextlib.suppress(ActionFailedError, ChangedInputError), probing([stage]) as probed:
        executor.run(build("gpipe", 1, 1, "always"), 0, (3,), (images,), SumOfSquares())
    return probed


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (custom_models.halves_unseen(), "in_place", "use inplace=False"),
        (custom_models.draws_elsewhere("random"), "random", "draws from Python's random module"),
        (custom_models.draws_elsewhere("numpy"), "random", "draws from numpy.random"),
        (custom_models.draws_elsewhere("generator"), "state", "a source that torch's seed does not rule"),
        (with_layers(custom_models.Remembers()), "state", "changes its attribute calls"),
        (with_layers(custom_models.asks()), "state", "asks whether gradients are recorded"),
        (with_layers(custom_models.Tracking(inplace=False)), "state", "changes its own seen"),
        (with_layers(parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))), "state", "changes its own parametrizations"),
        (with_layers(custom_models.Follows("float")), "state", "changes its attribute seen"),
        (with_layers(custom_models.Follows("tensor")), "state", "changes its attribute seen"),
        (with_layers(custom_models.Follows("list")), "state", "changes its attribute seen"),
        (with_layers(custom_models.Follows("array")), "state", "changes its attribute seen"),
        (with_layers(nn.Sequential(nn.ReLU(), custom_models.Follows())), "state", "changes its attribute 1.seen"),
    ],
)
def test_the_layer_that_cannot_be_pipelined_is_named(model: nn.Sequential, kind: str, words: str) -> None:
    found = watched(model).findings
    assert [(finding.kind, finding.layer) for finding in found] == [(kind, "1")]
    assert words in found[0].text


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return self.inner(tokens, tokens, tokens)[0].transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(
    "layer",
    [
        custom_models.Caches,
        custom_models.CountsCalls,
        Attends,
        lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
        lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)).eval(),
        lambda: custom_models.odd()[4],
    ],
)
def test_what_a_layer_keeps_and_does_not_evaluate_with_is_no_state(layer: Callable[[], nn.Module]) -> None:
    """Masks and tables by shape, counts of calls, what it was given last."""
    assert watched(with_layers(layer())).findings == ()


def test_a_layer_reads_what_its_stage_has() -> None:
    """What tracing cannot see: equal layers of which the first has what all of them read; and it is known too late
    that what was kept from the meta device has no values."""
    model = custom_models.run_the_first()
    assert watched(model).findings == ()
    (found, *_) = watched(model[1:]).findings
    assert (found.kind, found.layer) == ("foreign", "1")
    assert "keep the two layers together by partition.balance" in found.text
    with torch.device("meta"):
        kept = torch.ones(4, 4, 1, 1)
    (found,) = watched(with_layers(custom_models.KeepsTensor(kept))).findings
    assert (found.kind, found.layer) == ("foreign", "1")
    assert "has no values" in found.text


def test_layers_that_can_are_left_alone() -> None:
    """Also by being watched: weights, statistics, what they remember, gradients and generators are as before."""

    def make(inner: nn.Module) -> nn.Sequential:
        made = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), inner, nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 4)]
        return nn.Sequential(*made)

    model = make(custom_models.Remembers())
    model[2].register_buffer("stretched", torch.ones(1).expand(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    assert watched(model).draws
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model[2].calls == 0
    assert watched(make(nn.ReLU())).findings == ()
    assert not watched(make(nn.ReLU()).eval()).draws


def test_a_layer_on_a_gpu_may_draw_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    for draws in (False, True):
        layer, inputs = nn.Dropout(0.5).train(draws), (torch.ones(4),)
        stage = Stage(0, nn.Sequential(layer), first_layer=0, inputs=(), device=torch.device("cuda", 0), run_seed=0)
        seen = _Seen(probed := Probed(), stage)
        seen.begins("0", layer, inputs)
        seen.ended("0", layer, inputs, layer(*inputs))
        assert probed.draws is draws


def test_a_layer_that_runs_another_is_no_state_and_what_one_raises_ends_the_watch() -> None:
    raises = nn.Sequential(nn.Flatten(), custom_models.Does(lambda x: {}["x"]), custom_models.Remembers())
    for model in (custom_models.holds_another(), raises):
        assert watched(model).findings == ()
        assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(("model", "layer"), [("scales_in_place", "1"), ("changes_a_mask", "2")])
def test_a_training_refuses_a_layer_that_changes_its_input(model: str, layer: str, tmp_path: Path) -> None:
    """A mask that needs no gradient was halved in place just behind a cut: recomputed from what was left of it, the
    gradients were others, and nothing said so. Some of it can be seen on the meta device, the rest at the first F."""
    settings = [f"model.target=custom_models:{model}", "partitions=2", "executor=in_process"]
    balance = [f"partition.balance=[{layer},{4 if layer == '1' else 5}]"]
    with pytest.raises(ChangedInputError, match=f"layer {layer} changes its input in place") as refused:
        train_here(configure(*CUSTOM, *settings, *balance, "check_layers=false", "recompute=always"), tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("model", "what"), [("tracks", "own"), ("follows", "attribute")])
def test_a_training_refuses_what_a_recomputation_would_count_twice(model: str, what: str, tmp_path: Path) -> None:
    """It was trained without a word, with statistics that depended on what was recomputed; those in an attribute, which
    only evaluations look at, left no other trace than another test loss."""
    settings = [*CUSTOM, f"model.target=custom_models:{model}", "executor=in_process", "partitions=2", "max_steps=1"]
    with pytest.raises(InputError, match=rf"layer 1 changes its {what} seen.*check_layers=false"):
        train_here(configure(*settings), tmp_path / "refused")
    assert not list((tmp_path / "refused").iterdir())
    train_here(configure(*settings, "check_layers=false"), tmp_path / "as_it_is")
    if model == "tracks":
        assert final_tensors(tmp_path / "as_it_is")["model/1.seen"] != 0


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
    rows = [within(Variant(1, 3, "1f1b", "never", "in_process"), d, 1e-5) for d in (0.0, 3.1e-7, 1.1e-5, math.nan)]
    assert [row.verdict for row in rows] == ["identical", "within tolerance", "differs", "differs"]
    assert rows[-1].difference is None  # JSON has no such number
