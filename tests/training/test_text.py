"""The laws for language models and translation: dropout and padding on, several lengths in a run, batches by tokens."""

import math
import random
from pathlib import Path

import pytest
import torch
from training_runs import assert_same_tensors, command, configure, final_tensors, of_type, train_here

from gpipe_cli.reporting.run.result import read_result
from gpipe_cli.training.events import Evaluated, StepDone, TrainingReady

COMMON = [
    "~presets",
    "micro_batches=3",
    "threads=1",
    "device=cpu",
    "epochs=2",
    "ema_decay=0.9",
    "gradient_clipping=0.5",
    "label_smoothing=0.1",
    "learning_rate.warmup_steps=2",
    "model.layers=2",
    "model.width=8",
    "model.hidden=12",
    "model.heads=2",
    "model.dropout=0.2",
    "model.attention_dropout=0.2",
]
LANGUAGE_MODEL = ["model=transformer_lm", "dataset=text_files", "model.length=12", "batch_size=8"]
TRANSLATION = [
    "model=transformer_nmt",
    "dataset=parallel_text",
    "model.head_width=3",
    "model.length=48",
    "batch_size=null",
    "batch_tokens=300",
]
SHARED = ["model.shared_embedding=true", "model.logit_clip=5"]
SEPARATE = ["model.shared_embedding=false", "model.depth_scaled=false"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and pairs of sentences, 1 to 9 words long, in two languages of very different size."""
    folder = tmp_path_factory.mktemp("corpora")
    chance = random.Random(5)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 5))) for _ in range(50)]

    def sentence() -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, 9)))

    (folder / "text.txt").write_text("\n".join(sentence() for _ in range(70)) + "\n", encoding="utf-8")
    pairs = [(sentence(), "de-en" if number % 6 else "fr-en") for number in range(150)]
    lines = [f"{source[::-1]}\t{source}\t{languages}" for source, languages in pairs]
    (folder / "train.tsv").write_text("\n".join(lines[:120]) + "\n", encoding="utf-8")
    (folder / "test.tsv").write_text("\n".join(lines[120:]) + "\n", encoding="utf-8")
    return folder


def settings_of(task: str, corpora: Path) -> list[str]:
    """Everything that has a state or draws random numbers is on."""
    more = {
        "language_model": [*LANGUAGE_MODEL, "dataset.vocabulary=300"],
        "translation": [*TRANSLATION, *SHARED, "dataset.vocabulary=310"],
        "translation_separate": [*TRANSLATION, *SEPARATE, "dataset.vocabulary=310"],
    }[task]
    return [*COMMON, *more, f"dataset.root={corpora}", f"dataset.cache={corpora / 'cache'}"]


def test_the_activations_of_a_translation_are_predicted_for_the_mini_batch_that_is_counted(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is for the longest sentences, and the counted mini-batch has others: they were 12 to 19 % apart."""
    settings = [*settings_of("translation", corpora), "partitions=2", "executor=in_process", "max_steps=3"]
    assert command(monkeypatch, "train", *settings, f"run_folder={tmp_path / 'run'}") == 0
    result = read_result(tmp_path / "run")
    assert result["activation_bytes"] == result["predicted_activation_bytes"]
    assert result["activation_bytes"] != result["prediction"]["activation_bytes"]


TASKS = ("language_model", "translation", "translation_separate")


@pytest.fixture(scope="module", params=TASKS)
def whole(
    request: pytest.FixtureRequest, corpora: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path, list[object]]:
    """A run with one partition: its settings, its folder, what it reported."""
    settings = settings_of(request.param, corpora)
    folder = tmp_path_factory.mktemp("whole")
    heard = train_here(configure(*settings, "partitions=1", "executor=in_process"), folder)
    return settings, folder, heard


def test_what_is_compared_has_everything_in_it(whole: tuple[list[str], Path, list[object]]) -> None:
    """The laws would hold trivially for a run in which nothing random happened and no sentence was padded."""
    settings, folder, heard = whole
    steps = of_type(heard, StepDone)
    if "dataset=parallel_text" in settings:
        assert len({step.samples for step in steps}) > 1, "batches by tokens have as many sentences as fit"
    else:
        assert steps[0].samples == 8
        assert any(step.tokens < 12 * step.samples for step in steps), "a window of the text was padded"
    assert all(step.loss != step.cross_entropy for step in steps), "label smoothing never acted"
    assert any(step.gradient_norm > 0.5 for step in steps), "clipping never acted"
    assert all(tensor.isfinite().all() for tensor in final_tensors(folder).values())
    tests = of_type(heard, Evaluated)
    assert [test.tokens for test in tests] == [tests[0].tokens] * len(tests)


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
def test_partitions_in_one_process_make_the_same_run(
    recompute: str, whole: tuple[list[str], Path, list[object]], tmp_path: Path
) -> None:
    settings, folder, heard = whole
    cut = train_here(
        configure(*settings, "partitions=3", "executor=in_process", f"recompute={recompute}"), tmp_path / "cut"
    )
    assert_same_tensors(final_tensors(tmp_path / "cut"), final_tensors(folder))
    assert of_type(cut, Evaluated) == of_type(heard, Evaluated)


def test_a_process_for_each_partition_makes_the_same_run(
    whole: tuple[list[str], Path, list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage in the middle never sees a sentence and must still know how long they are."""
    settings, folder, heard = whole
    arguments = [*settings, "partitions=3", "executor=distributed", f"run_folder={tmp_path}"]
    assert command(monkeypatch, "train", *arguments) == 0
    assert_same_tensors(final_tensors(tmp_path), final_tensors(folder))
    result, evaluated = read_result(tmp_path), of_type(heard, Evaluated)[-1]
    assert (result["test"]["loss"], result["test"]["token_accuracy"]) == (evaluated.loss, evaluated.top1)
    assert result["unigram_perplexity"] > 1


def test_stopped_within_an_epoch_and_resumed_with_other_partitions(
    whole: tuple[list[str], Path, list[object]], tmp_path: Path
) -> None:
    settings, folder, _ = whole
    before, after = tmp_path / "before", tmp_path / "after"
    train_here(configure(*settings, "partitions=2", "executor=in_process", "max_steps=4"), before)
    train_here(configure(*settings, "partitions=1", "executor=in_process", f"resume={before}"), after)
    assert_same_tensors(final_tensors(after), final_tensors(folder))


@pytest.mark.parametrize("task", TASKS)
def test_micro_batches_hardly_matter(task: str, corpora: Path, tmp_path: Path) -> None:
    """Law 2, where padding is: each token weighs the same, however unevenly sentences fall to micro-batches.

    Dropout draws anew for each micro-batch, so it is off.
    """
    settings = [
        *settings_of(task, corpora), "model.dropout=0", "model.attention_dropout=0", "max_steps=1", "optimizer=sgd",
        "learning_rate=constant", "learning_rate.peak=1", "gradient_clipping=0", "ema_decay=0", "partitions=1",
        "executor=in_process",
    ]  # fmt: skip
    settings.remove("learning_rate.warmup_steps=2")
    found = []
    for micro_batches in (1, 3, 7):
        folder = tmp_path / str(micro_batches)
        train_here(configure(*settings, f"micro_batches={micro_batches}"), folder)
        found.append(final_tensors(folder))
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_is_evaluated_does_not_depend_on_the_micro_batches(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert command(monkeypatch, "train", *settings_of("language_model", corpora), f"run_folder={folder}") == 0
    trained = read_result(folder)["test"]
    for change in (["partitions=1"], ["partitions=3", "micro_batches=2"], ["batch_tokens=48"]):
        assert command(monkeypatch, "evaluate", f"run={folder}", "checkpoint=last", *change) == 0
        found = read_result(folder, "evaluate.json")
        assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
        assert found["tokens"] == trained["tokens"]
        assert found["token_accuracy"] == pytest.approx(trained["token_accuracy"], rel=1e-6)


def test_resuming_on_other_data_is_refused(corpora: Path, tmp_path: Path) -> None:
    """A position in an epoch of 9 steps means nothing in one of another length."""
    settings = [*settings_of("language_model", corpora), "partitions=1", "executor=in_process"]
    train_here(configure(*settings, "max_steps=2"), tmp_path / "before")
    with pytest.raises(ValueError, match=r"resume=.*: an epoch had \d+ steps there and has \d+ now, so the data"):
        train_here(configure(*settings, "model.length=6", f"resume={tmp_path / 'before'}"), tmp_path / "after")


def test_an_evaluation_translates_the_same_whatever_the_partitions(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert command(monkeypatch, "train", *settings_of("translation", corpora), f"run_folder={folder}") == 0
    found = []
    for change in (["partitions=1"], ["partitions=3", "micro_batches=2"], ["partitions=2", "batch_size=3"]):
        assert command(monkeypatch, "evaluate", f"run={folder}", "decode.sentences=12", *change) == 0
        found.append(read_result(folder, "evaluate.json")["translation"])
    assert (found[0]["sentences"], found[0]["of"], found[0]["beam"]) == (12, 30, 4)
    assert found[0]["chrf_copy"] > 0
    assert len({example["source"] for example in found[0]["examples"]}) == 12
    for other in found[1:]:
        assert {**other, "seconds": 0} == {**found[0], "seconds": 0}
    assert command(monkeypatch, "evaluate", f"run={folder}", "decode.sentences=0") == 0
    assert read_result(folder, "evaluate.json")["translation"] is None


def test_a_few_sentences_are_translated_at_each_evaluation(whole: tuple[list[str], Path, list[object]]) -> None:
    settings, _, heard = whole
    evaluated = of_type(heard, Evaluated)
    if "model=transformer_lm" in settings:
        assert [message.translations for message in evaluated] == [(), ()]
        return
    first, second = (message.translations for message in evaluated)
    assert len(first) == 8
    assert [row.source for row in first] == [row.source for row in second]
    assert all(row.reference == row.source[::-1] for row in first)


def test_a_language_model_learns_more_than_how_frequent_tokens_are(tmp_path: Path) -> None:
    """On the text that everybody has, from the preset: two epochs of it."""
    heard = train_here(configure("model=transformer_lm", "partitions=2", "executor=in_process", "epochs=2"), tmp_path)
    perplexity = math.exp(of_type(heard, Evaluated)[-1].loss)
    assert perplexity < 0.6 * of_type(heard, TrainingReady)[0].data.unigram_perplexity
