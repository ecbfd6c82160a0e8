"""`gpipe help`: what the files, the glossary and the recipes say, and nothing of its own."""

import contextlib
import re

import pytest
from training_runs import SMALL, command

from gpipe_cli.commands.help import glossary, topics


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("filters", "model.filters=16  (model=amoebanet)\n"),
        ("schedule=1f1b", "schedule=1f1b  (gpipe train)\n    a backward as soon as one can run\n"),
        ("table2_amoebanet", "gpipe reproduce table2_amoebanet\n    Throughput of AmoebaNet-D (18, 256)"),
        ("samples_per_second", "samples_per_second  (samples/s)\n    Samples of a mini-batch"),
    ],
)
def test_topics(topic: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):  # by Hydra, after the help of a command
        assert command("help", topic) == 0
    assert shown in capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Topic -> excerpt of each line of `gpipe help -k`."""
    assert command("help", "-k", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    parts = [re.fullmatch(r"gpipe help (\S+(?: \S+)*)(?: {2,}(.*))?", line) for line in lines]
    return {part[1]: part[2] for part in parts if part is not None}


def test_topics_are_found_by_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each, of every kind."""
    monkeypatch.setenv("COLUMNS", "80")
    memory = found(capsys, "MEMORY")
    assert set(memory) >= {"hardware.memory_gib", "recompute", "unet_memory", "memory_bytes_fullest", "d", "plan"}
    assert memory["recompute"] == "auto: as few as fit the memory", "the clause with the word"
    assert all(topic in topics() for topic in memory)
    many = found(capsys, "libraries", "process")
    assert command("help", "libraries", "process") == 0, "no topic, but words in the texts of many"
    assert capsys.readouterr().out.count("\n") == len(many) > 1
    assert {"recompute", "solve"} & set(memory) & set(found(capsys, "memory", "model")) == {"solve"}, "all of the words"


@pytest.mark.parametrize(
    ("topic", "figures"),
    [
        ("K", ["stage 1 | .  F0 F1 F2 F3 .  .  B3 B2 B1 B0\n", "(K-1)/(M+K-1) = 2/6 = 33.3 %", "K = 8   87.5 %"]),
        ("schedule=1f1b", ["stage 2 | .  .  F0 B0 F1 B1", "at most 3, 2, 1 micro-batches on stages 0, 1, 2"]),
        ("recomputation", ["F3 R3", "at most 1 micro-batch on each", "1.17 times as long", "idle: 27.3 %"]),
    ],
)
def test_pictures_have_figures_of_the_schedules_themselves(
    topic: str, figures: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpipe and 1f1b are idle for (K-1)/(M+K-1); except_last takes M - 1 of 3 (M + K - 1) forwards more."""
    monkeypatch.setenv("COLUMNS", "80")
    assert command("help", topic) == 0
    shown = capsys.readouterr().out
    assert [figure for figure in figures if figure not in shown] == []
    assert max(map(len, shown.splitlines())) <= 80


def test_every_word_that_a_run_prints_is_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    """`gpipe help measured_contended` knew nothing, and `imbalance` was another number than the one that is printed."""
    images = [*SMALL, "partitions=2", "max_steps=1"]
    assert command("train", *images) == 0
    assert command("bench", *images[:-1], "steps=1", "warm_up_steps=0") == 0
    words = {"measured_contended", "measured_one_device", "measured"}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(("epoch ", "stage  ", "% of a step", "memory, ")):
            heading = re.sub(r"^% of a step|^memory, \w+|=", "", line)
            words |= set(re.findall(r"(?:train|test) loss|\S+", heading))
    assert {"train loss", "lr", "cost", "imbalance", "peak", "libraries"} <= words
    for word in sorted(words):
        assert command("help", word) == 0
        assert not capsys.readouterr().out.startswith("gpipe help "), f"{word}: only found in other topics"
    assert command("help", "imbalance") == 0
    assert capsys.readouterr().out.startswith("imbalance\n    load imbalance: time that stages wait")


def test_words_are_those_of_the_glossary() -> None:
    known = glossary()
    assert {"bubble", "stage", "imbalance", "recipe"} <= known.keys()
    assert [word for word, _ in topics()["words"]] == list(known)
    assert known["micro-batch"] == "one of the M pieces of a mini-batch (M, m)"
