"""What the Transformers bring along, and which models, data and sizes of mini-batches do not fit each other."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from gpipe_cli.commands.evaluate import evaluation
from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.config.model import TransformerLMConfig
from gpipe_cli.config.settings import EvaluateSettings, TrainConfig, from_tree, load, to_yaml


def tree(*overrides: str, name: str = "train") -> Any:
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        return compose(name, list(overrides))


def train(*overrides: str) -> TrainConfig:
    return from_tree(TrainConfig, tree(*overrides))


@pytest.mark.parametrize(
    ("model", "dataset", "task"),
    [("transformer_lm", "python_docs", "language_model"), ("transformer_nmt", "cldr", "translation")],
)
def test_a_transformer_brings_what_suits_it(model: str, dataset: str, task: str) -> None:
    config = train(f"model={model}")
    assert (config.dataset.name, config.optimizer.name, config.learning_rate.name) == (dataset, "adam", "inverse_sqrt")
    assert (config.task, config.preset) == (task, "small")
    assert config == train(f"model={model}", f"dataset={dataset}", "optimizer=adam", "learning_rate=inverse_sqrt")


def test_the_command_line_wins_over_what_a_model_brings() -> None:
    config = train("model=transformer_lm", "optimizer=sgd", "model.layers=6", "epochs=3", "learning_rate=constant")
    assert isinstance(config.model, TransformerLMConfig)
    assert (config.optimizer.name, config.model.layers, config.epochs) == ("sgd", 6, 3)
    assert config.learning_rate.name == "constant"
    assert config.preset == "small"  # of which the rest holds


@pytest.mark.parametrize(
    "overrides", ["dataset=synthetic_text", "~presets", "~presets dataset=text_files dataset.root=x"]
)
def test_without_a_preset_sizes_are_the_papers(overrides: str) -> None:
    config = train("model=transformer_lm", *overrides.split())
    assert config.preset is None
    assert isinstance(config.model, TransformerLMConfig)
    assert (config.model.width, config.model.hidden, config.model.heads, config.model.length) == (2048, 8192, 32, 1024)


@pytest.mark.parametrize(
    "overrides", ["model=transformer_lm dataset=text_files", "model=transformer_nmt dataset=parallel_text"]
)
def test_text_of_ones_own_begins_small(overrides: str) -> None:
    """A newcomer's text file was given the paper's 184 million parameters."""
    config = train(*overrides.split(), "dataset.root=x")
    assert (config.preset, config.max_steps) == ("small", 400)
    assert config.model.width == 128  # type: ignore[union-attr]  # a Transformer
    assert config.dataset.vocabulary == 4000  # type: ignore[union-attr]  # of text


@pytest.mark.parametrize("rate", ["paper", "inverse_sqrt", "cosine", "constant"])
def test_every_learning_rate_goes_with_a_preset(rate: str) -> None:
    """The preset once set a warm-up in steps, which three of the four do not have."""
    assert train("model=transformer_lm", f"learning_rate={rate}").learning_rate.name == rate


def test_a_language_model_of_any_text_is_trained_for_perplexity() -> None:
    config = train("model=transformer_lm", "dataset=text_files", "dataset.root=x")
    assert (config.label_smoothing, config.gradient_clipping) == (0.0, 1.0)
    assert train("model=transformer_lm", "label_smoothing=0.2").label_smoothing == 0.2


@pytest.mark.parametrize("dataset", ["text_files", "parallel_text"])
def test_every_text_composes(dataset: str, tmp_path: Path) -> None:
    model = "transformer_lm" if dataset == "text_files" else "transformer_nmt"
    config = train(f"model={model}", f"dataset={dataset}", "dataset.root=/x", "batch_size=null", "batch_tokens=512")
    assert isinstance(config.dataset, TextConfig)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(tmp_path) == config


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            "dataset=cldr",
            "model=amoebanet: takes images, and dataset=cldr is text; use model=transformer_nmt",
        ),
        (
            "model=resnet dataset=python_docs",
            "model=resnet: takes images, and dataset=python_docs is text; use model=transformer_lm",
        ),
        (
            "model=transformer_lm dataset=digits",
            "model=transformer_lm: takes text, and dataset=digits has images; use dataset=python_docs",
        ),
        (
            "model=transformer_lm dataset=cldr",
            "model=transformer_lm: continues text, and dataset=cldr has pairs; use model=transformer_nmt",
        ),
        (
            "model=transformer_nmt dataset=python_docs",
            "model=transformer_nmt: translates, and dataset=python_docs has no pairs; use model=transformer_lm, or "
            "dataset=cldr",
        ),
        (
            "model=custom model.target=a:b dataset=python_docs",
            "model.length=null: text needs the most tokens of a sequence; give model.length=...",
        ),
        ("batch_size=null batch_tokens=64", "batch_tokens=64: images have no tokens; leave it out and use batch_size"),
        (
            "model=transformer_nmt batch_size=64",  # (the command itself replaces the preset's batch_tokens)
            "batch_size=64, batch_tokens=2048: both are given, and one of them says how large a mini-batch is; "
            "add batch_tokens=null or batch_size=null",
        ),
        ("batch_size=null", "batch_size=null, batch_tokens=null: neither is given"),
        (
            "model=transformer_nmt learning_rate=paper ~presets batch_size=null batch_tokens=64",
            "learning_rate=paper: is so much per sample, and batch_tokens=64 counts tokens; use "
            "learning_rate=inverse_sqrt",
        ),
        ("model=transformer_lm model.length=1", "model.length=1: must be 2 or more"),
        ("model=transformer_lm +dataset.root=x", "dataset.root=x: dataset=python_docs has no such setting"),
        ("model=transformer_nmt dataset.temperature=0.5", "dataset.temperature=0.5: must be 1 or more"),
        ("model=transformer_nmt dataset.direction=east", "must be one of to_english, from_english, both"),
    ],
)
def test_what_does_not_fit_is_one_line(overrides: str, line: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the line is compared below, without escaping it)
        train(*overrides.split())
    assert line in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_evaluation_by_samples_replaces_that_by_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(train("model=transformer_nmt")))
    given = from_tree(EvaluateSettings, tree(f"run={tmp_path}", "batch_size=16", name="evaluate"))
    config = evaluation(given).training
    assert (config.batch_size, config.batch_tokens) == (16, None)
