"""What is chosen for `auto`, what is solved for, and what is said when nothing fits."""

import math
from dataclasses import replace
from typing import Any

import pytest
from plan_runs import plan_of, traced
from training_runs import TINY, configure

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.errors import InputError
from gpipe_cli.models.transformer import SelfAttentionLayer
from gpipe_cli.planner.auto_settings import NothingFitsError, _training_samples, choose, solve_max_model
from gpipe_cli.planner.cost_model import StepCosts, predicted_costs
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.process_layout import Layout, TooLargeError, layout_of
from gpipe_cli.schedule.simulator import StageCost

SETTINGS = [*TINY, "batch_size=16", "hardware=h200"]
LM = ["model=transformer_lm", "model.width=32", "model.hidden=64", "model.heads=2", "model.length=16",
      "dataset=synthetic_text", "dataset.vocabulary=50", "batch_tokens=null", "batch_size=8",
      "hardware=h200"]  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return traced(*SETTINGS)


def with_overhead(seconds: float):  # type: ignore[no-untyped-def]
    """Layers that cost a millisecond a sample, and `seconds` for every micro-batch."""

    def costs_of(config: TrainConfig, profile: ModelProfile, layout: Layout) -> StepCosts:
        of_figures = predicted_costs(config, profile, layout)
        each = 1e-3 * config.batch_size / config.micro_batches + seconds  # type: ignore[operator]
        layers = (StageCost(each, each, 2 * each),) * len(profile.costs)
        return StepCosts("made up", "data_sheet", layers, (0.0,) * len(layers), of_figures.edges, ())

    return costs_of


def test_more_micro_batches_pay_until_each_costs_too_much(profile: ModelProfile) -> None:
    chosen = []
    for overhead in (0.0, 1e-3, 1.0):
        plan = choose(configure(*SETTINGS, "partitions=2"), ["micro_batches"], profile, with_overhead(overhead))
        (choice,) = plan.choices
        chosen.append(plan.config.micro_batches)
        assert [tried.value for tried in choice.candidates] == ["1", "2", "4", "8", "16"]
        assert (choice.chosen.value, choice.chosen.plan.timeline) == (str(plan.config.micro_batches), plan.timeline)
        assert plan.step_seconds <= 1.01 * min(tried.plan.step_seconds for tried in choice.candidates)
    assert chosen == [16, 2, 1]


def test_a_micro_batch_of_one_is_no_candidate_where_batch_norm_refuses_it() -> None:
    """ResNet-18 leaves one pixel of an image of 32."""
    config = configure("model=resnet", "model.depth=18", *TINY[2:-2], "dataset.image_size=32", "hardware=h200")
    (choice,) = choose(config, ["micro_batches"], profile_model(config), with_overhead(0.0)).choices
    last = choice.candidates[-1]
    assert (last.value, last.plan) == ("8", None)
    assert "more than 1 value" in last.reason


def test_partitions_and_micro_batches_are_chosen_together(profile: ModelProfile) -> None:
    plan = choose(
        configure(*SETTINGS), ["partitions", "micro_batches"], profile, with_overhead(0.0), other_machine=True
    )
    config, (choice,) = plan.config, plan.choices
    assert choice.setting == "partitions, micro_batches"
    assert len(choice.candidates) == 4 * 5 - 5 * (len(profile.costs) < 8)
    assert (config.partitions, config.micro_batches) == (len(plan.balance), plan.micro_batches)
    assert choice.chosen.value == f"{config.partitions}, {config.micro_batches}"
    cut = configure(*SETTINGS, f"partition.balance=[1,{len(profile.costs) - 1}]")
    plan = choose(cut, ["partitions"], profile, with_overhead(0.0), other_machine=True)
    (choice,) = plan.choices
    assert plan.config.partitions == 2
    assert sum(tried.plan is not None for tried in choice.candidates) == 1


def needed_gib(config: TrainConfig, profile: ModelProfile) -> float:
    plan = plan_of(config, profile)
    return max(stage.total_bytes for stage in plan.memory) / 2**30


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ("partitions=2 micro_batches=1 recompute=always", "micro_batches=4"),
        ("partitions=2 micro_batches=4 recompute=never", "recompute=always"),
        ("partitions=8 micro_batches=2 recompute=never", "micro_batches=8 recompute=always"),
        ("partitions=8 micro_batches=8 recompute=always batch_size=1 micro_batches=1", ""),
    ],
)
def test_settings_are_advised_before_more_memory_and_no_more_of_them_than_it_takes(settings: str, remedy: str) -> None:
    """Where one change was not enough, the message used to advise nothing but more memory; and partitions=9 with a
    balance for 8."""
    base = [*LM, "model.layers=6", *settings.split()]
    profile = traced(*LM, "model.layers=6")
    limit_bytes = math.ceil(needed_gib(configure(*base, *remedy.split()), profile) * 2**30)
    config = configure(*base, f"hardware.memory_gib={(limit_bytes if remedy else limit_bytes / 2) / 2**30}")
    with pytest.raises(NothingFitsError) as error:
        choose(config, [], profile, predicted_costs)
    advised, more = str(error.value).rpartition("; use ")[2].split(" or ")
    assert advised == (remedy or "a smaller model")
    assert more.startswith("hardware.memory_gib=")
    choose(configure(*base, more), [], profile, predicted_costs)  # what it advises does fit


@pytest.mark.parametrize(
    ("settings", "recompute"),
    [
        ([*SETTINGS, "partitions=2", "micro_batches=4"], "except_last"),
        ([*SETTINGS, "partitions=3", "micro_batches=2", "replicas=2", "schedule=1f1b"], "never"),
        ([*SETTINGS, "partitions=4", "micro_batches=4", "schedule=interleaved", "stages_per_process=2"], "always"),
        ([*SETTINGS, "partitions=2", "micro_batches=3", "schedule=auto"], "auto"),
        ([*LM, "partitions=1", "micro_batches=5", "batch_size=null", "batch_tokens=16"], "always"),
    ],
)
def test_the_largest_mini_batch_fits_and_one_sample_more_a_micro_batch_does_not(
    settings: list[str], recompute: str
) -> None:
    key = "batch_tokens" if "batch_size=null" in settings else "batch_size"
    if key == "batch_size":
        settings = [*settings, "batch_size=16"]
    found = traced(*settings)
    given = configure(*settings, f"recompute={recompute}", "hardware.memory_gib=0.02", "dataset.train_samples=100000")
    plan = choose(given, [key], found, predicted_costs)
    config, (choice, *_) = plan.config, plan.choices
    limit = layout_of(given).limit_bytes
    each = given.micro_batches * given.replicas * (16 if key == "batch_tokens" else 1)
    samples, rest = divmod(getattr(config, key), each)
    assert (rest, choice.chosen.value, choice.chosen.plan.timeline) == (0, str(samples * each), plan.timeline)
    assert samples > 1
    stages = map(plan.device_of_stage.count, range(len(plan.device_bytes)))
    assert all(held <= limit * several for held, several in zip(plan.device_bytes, stages, strict=True))
    more = replace(config, **{key: (samples + 1) * each})
    with pytest.raises(TooLargeError):
        plan_of(more, found, limit)


def test_a_mini_batch_is_no_larger_than_the_training_set(profile: ModelProfile) -> None:
    config = configure(*SETTINGS, "micro_batches=3", "batch_size=3", "dataset.train_samples=64")
    plan = choose(config, ["batch_size"], profile, predicted_costs)
    (choice,) = plan.choices
    assert (plan.config.batch_size, len(choice.candidates)) == (63, 1)
    digits = configure("micro_batches=4", "batch_size=4", "hardware=h200")
    assert _training_samples(digits) == 1437, "it was the greatest that may be set, which the training refused"


@pytest.mark.parametrize(("memory_gib", "least"), [(0.001, 4), (0.1, 500)])
def test_the_largest_model_fits_and_the_next_one_does_not(
    memory_gib: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size that is tried builds a single layer, however many it has, and few sizes are tried."""
    built: list[SelfAttentionLayer] = []
    initialise = SelfAttentionLayer.__init__

    def counted(layer: SelfAttentionLayer, *sizes: Any, **settings: Any) -> None:
        built.append(layer)
        initialise(layer, *sizes, **settings)

    monkeypatch.setattr(SelfAttentionLayer, "__init__", counted)
    config = configure(*LM, "partitions=2", f"hardware.memory_gib={memory_gib}")
    plan = solve_max_model(config)
    solved, profile, (choice,) = plan.config, plan.profile, plan.choices
    limit, layers = layout_of(config).limit_bytes, solved.model.layers
    assert len(built) <= len(choice.candidates) + 2 <= 14
    assert max(stage.total_bytes for stage in plan.memory) <= limit
    assert len(profile.costs) == layers + 2 > least
    assert choice.chosen.value == str(layers)
    more = replace(config, model=replace(solved.model, layers=layers + 1))
    larger = profile_model(more)
    with pytest.raises(TooLargeError):
        plan_of(more, larger, limit)


def test_the_largest_model_has_a_layer_for_each_partition() -> None:
    """An estimate of the size had fewer layers than partitions, and was refused."""
    config = configure(*LM, "model.layers=64", "partitions=16", "hardware.memory_gib=0.0002")
    with pytest.raises(NothingFitsError, match="not even the smallest"):
        solve_max_model(config)
    plan = solve_max_model(replace(config, hardware=replace(config.hardware, memory_gib=0.0004)))
    assert plan.config.model.layers == 16


def test_the_largest_model_says_if_the_setting_allows_no_larger_one() -> None:
    (choice,) = solve_max_model(configure(*LM, "partitions=2", "hardware.memory_gib=1e6")).choices
    assert choice.rule.endswith(f"allows no more than {choice.chosen.value}")
    configure(*LM, f"model.layers={choice.chosen.value}")
    with pytest.raises(InputError, match=f"at most {choice.chosen.value}"):
        configure(*LM, f"model.layers={int(choice.chosen.value) + 1}")
