"""The laws for language models and translation: dropout and padding on, several lengths in a run, batches by tokens."""

import math
import random
from pathlib import Path

import pytest
import torch
from training_runs import assert_same_tensors, command, configure, final_tensors, of_type, train_here

from gpipe_cli.errors import InputError
from gpipe_cli.results.files import read_result
from gpipe_cli.training.events import Evaluated, StepDone, TrainingReady

# everything that has a state or draws random numbers is on
COMMON = [
    "~presets", "micro_batches=3", "threads=1", "device=cpu", "epochs=2", "ema_decay=0.9", "gradient_clipping=0.5",
    "label_smoothing=0.1", "learning_rate.warmup_steps=2", "model.layers=2", "model.width=8", "model.hidden=12",
    "model.heads=2", "model.dropout=0.2", "model.attention_dropout=0.2",
]  # fmt: skip
TASKS = {
    "language_model": [
        "model=transformer_lm", "dataset=text_files", "dataset.vocabulary=300", "model.length=12", "batch_size=8",
    ],
    "translation": [
        "model=transformer_nmt", "dataset=parallel_text", "dataset.vocabulary=310", "model.head_width=3",
        "model.length=48", "batch_size=null", "batch_tokens=300", "model.shared_embedding=true", "model.logit_clip=5",
    ],
}  # fmt: skip


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
    return [*COMMON, *TASKS[task], f"dataset.root={corpora}", f"dataset.cache={corpora / 'cache'}"]


Whole = tuple[list[str], Path, list[object]]  # settings, folder, messages


@pytest.fixture(scope="module", params=TASKS)
def whole(request: pytest.FixtureRequest, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run with one partition: its settings, its folder, what it reported."""
    settings = settings_of(request.param, corpora)
    folder = tmp_path_factory.mktemp("whole")
    messages = train_here(configure(*settings, "partitions=1", "executor=in_process"), folder)
    return settings, folder, messages


def test_what_is_compared_has_everything_in_it(whole: Whole) -> None:
    """The laws would hold trivially for a run in which nothing random happened and no sentence was padded."""
    settings, _, messages = whole
    steps = of_type(messages, StepDone)
    if "dataset=parallel_text" in settings:
        assert len({step.samples for step in steps}) > 1, "batches by tokens have as many sentences as fit"
    else:
        assert steps[0].samples == 8
        assert any(step.tokens < 12 * step.samples for step in steps), "a window of the text was padded"
    assert all(step.loss != step.cross_entropy for step in steps), "label smoothing never acted"
    assert any(step.gradient_norm > 0.5 for step in steps), "clipping never acted"
    first, second = of_type(messages, Evaluated)
    # a few sentences are translated at each evaluation
    assert len(first.translations) == (8 if "dataset=parallel_text" in settings else 0)
    assert [row.source for row in first.translations] == [row.source for row in second.translations]
    assert all(row.reference == row.source[::-1] for row in first.translations)


def test_a_process_for_each_partition_makes_the_same_run(whole: Whole, tmp_path: Path) -> None:
    """The stage in the middle never sees a sentence and must still know how long they are. (A language model's stages
    share a process.)"""
    settings, folder, messages = whole
    way = ["executor=distributed", "recompute=except_last"]
    if "model=transformer_lm" in settings:
        way = ["executor=in_process", "recompute=always"]
    assert command("train", *settings, "partitions=3", *way, f"run_folder={tmp_path}") == 0
    assert_same_tensors(final_tensors(tmp_path), final_tensors(folder))
    result, evaluated = read_result(tmp_path), of_type(messages, Evaluated)[-1]
    assert (result["test"]["loss"], result["test"]["token_accuracy"]) == (evaluated.scores.loss, evaluated.scores.top1)
    assert result["unigram_perplexity"] > 1
    # a plan is for the longest sentences; what is counted is predicted for the sentences of that mini-batch
    assert result["activation_bytes"] == result["predicted_activation_bytes"]
    assert "model=transformer_lm" in settings or (
        result["activation_bytes"] != result["prediction"]["activation_bytes"]
    )


def test_stopped_within_an_epoch_and_resumed_with_other_partitions(whole: Whole, tmp_path: Path) -> None:
    settings, folder, _ = whole
    before, after = tmp_path / "before", tmp_path / "after"
    train_here(configure(*settings, "partitions=2", "executor=in_process", "max_steps=4"), before)
    resume = [*settings, "partitions=1", "executor=in_process", f"resume={before}"]
    if "model=transformer_lm" in settings:  # a position in an epoch means nothing in one of another length
        with pytest.raises(InputError, match=r"resume=.*: an epoch had \d+ steps there and has \d+ now, so the data"):
            train_here(configure(*resume, "model.length=48"), after)
    train_here(configure(*resume), after)
    assert_same_tensors(final_tensors(after), final_tensors(folder))


def test_micro_batches_hardly_matter(corpora: Path, tmp_path: Path) -> None:
    """Law 2, where padding is: each token weighs the same, however unevenly sentences fall to micro-batches.

    Dropout draws again for each micro-batch, so it is off.
    """
    settings = [
        *(setting for setting in settings_of("translation", corpora) if "warmup" not in setting), "model.dropout=0",
        "model.attention_dropout=0", "max_steps=1", "optimizer=sgd", "learning_rate=constant", "learning_rate.peak=1",
        "gradient_clipping=0", "ema_decay=0", "partitions=1", "executor=in_process",
    ]  # fmt: skip
    for micro_batches in (1, 7):
        train_here(configure(*settings, f"micro_batches={micro_batches}"), tmp_path / str(micro_batches))
    one, seven = final_tensors(tmp_path / "1"), final_tensors(tmp_path / "7")
    torch.testing.assert_close(seven, one, rtol=1e-4, atol=1e-5)


def test_an_evaluation_depends_neither_on_micro_batches_nor_on_partitions(whole: Whole) -> None:
    settings, folder, messages = whole
    translates = "model=transformer_nmt" in settings
    trained, found = of_type(messages, Evaluated)[-1].scores, []
    changes = [["partitions=2", "micro_batches=2", "executor=distributed"]] if translates else [["batch_tokens=48"]]
    if translates:
        changes.append(["partitions=1", "batch_size=3"])
    for change in changes:
        decode = ["decode.sentences=12"] if translates else []
        assert command("evaluate", f"run={folder}", "checkpoint=last", *decode, *change) == 0
        scores = read_result(folder, "evaluate.json")
        assert scores["loss"] == pytest.approx(trained.loss, rel=1e-5)
        assert scores["tokens"] == trained.tokens
        assert scores["token_accuracy"] == pytest.approx(trained.top1, rel=1e-6)
        if translates:
            found.append(scores["translation"])
    if translates:
        assert (found[0]["sentences"], found[0]["of"], found[0]["beam"]) == (12, 30, 4)
        assert found[0]["chrf_copy"] > 0
        assert sum(pair["sentences"] for pair in found[0]["pairs"]) == 12
        assert [pair["pair"] for pair in found[0]["pairs"]] == ["de-en", "fr-en"]
        assert len({example["source"] for example in found[0]["examples"]}) == 12
        assert {**found[0], "seconds": 0} == {**found[1], "seconds": 0}


def test_a_language_model_learns_more_than_how_frequent_tokens_are(tmp_path: Path) -> None:
    """On the text that comes with Python, with a small model of the preset."""
    small = ["model.layers=1", "model.width=64", "model.hidden=128", "model.length=32", "dataset.vocabulary=500"]
    fast = ["learning_rate.peak=0.01", "learning_rate.warmup_steps=20", "max_steps=70"]
    run = ["partitions=2", "executor=in_process", "threads=1", *fast]
    messages = train_here(configure("model=transformer_lm", *small, *run), tmp_path)
    perplexity = math.exp(of_type(messages, Evaluated)[-1].scores.loss)
    unigram_perplexity = of_type(messages, TrainingReady)[0].data.unigram_perplexity
    assert unigram_perplexity is not None
    assert perplexity < 0.8 * unigram_perplexity
