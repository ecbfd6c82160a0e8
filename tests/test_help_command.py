"""`gpipe help`: what the files, the glossary and the recipes say, and nothing of its own."""

import contextlib
import re

import pytest
from training_runs import command

from gpipe_cli.commands.help import glossary, topics
from gpipe_cli.config.comments import all_settings
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import settings


def test_every_setting_is_a_topic_with_the_whole_comment() -> None:
    """Those of a choice of a group too; comments of several lines are one."""
    found = {one.key: one for one in all_settings() if one.place in ("train", "model=amoebanet")}
    assert {key for key in settings(TrainConfig) if "." not in key or key.startswith("checkpoint.")} <= {
        *found, "partition", "checkpoint", "hardware", "model", "dataset", "optimizer", "learning_rate",
    }  # fmt: skip
    assert found["schedule"].text.startswith("gpipe: all forwards, then all backwards (Figure 2c) | 1f1b:")
    assert found["schedule"].text.endswith("All but gpipe and files have the same bits")
    assert (found["checkpoint.keep"].value, found["model.filters"].value) == ("2", "16")
    assert all(one.text for one in all_settings() if "=" not in one.place)


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("filters", "model.filters=16  (model=amoebanet)\n"),
        ("schedules", "schedule=gpipe  (gpipe train)\n"),
        ("schedule=1f1b", "schedule=1f1b  (gpipe train)\n    a backward as soon as one can run\n"),
        ("Micro-Batch", "micro_batches=4  (gpipe train)\n    M, 1 to batch_size: pieces"),
        ("partitions=4", "partitions=2  (gpipe train)\n    K, 1 to the number of layers"),
        ("h100", "hardware=h100\n    NVIDIA H100, 80 GB, SXM"),
        ("table2_amoebanet", "gpipe reproduce table2_amoebanet\n    Throughput of AmoebaNet-D (18, 256)"),
        ("samples_per_second", "samples_per_second  (samples/s)\n    Samples of a mini-batch"),
        ("settings", "epochs=5\n    1 or more\n"),
        ("train", "Usage: gpipe train"),
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
    """One line for each, of every kind; those with the word in their name are first; what only lists them is none."""
    monkeypatch.setenv("COLUMNS", "80")
    memory = found(capsys, "MEMORY")
    assert set(memory) >= {"hardware.memory_gib", "recompute", "unet_memory", "memory_bytes_fullest", "d", "plan"}
    assert ["memory" in name for name in memory] == sorted(("memory" in name for name in memory), reverse=True)
    assert not {"settings", "measures", "model", "memory_gib"} & set(memory)
    assert memory["recompute"] == "auto: as few as fit the memory", "the clause with the word"
    assert all(topic in topics() for topic in memory)
    assert {"recompute", "solve"} & set(memory) & set(found(capsys, "memory", "model")) == {"solve"}, "all of the words"
    batches = found(capsys, "micro-batch")
    assert list(found(capsys, "micro_batches")) == list(found(capsys, "Micro", "batches")) == list(batches)
    assert list(batches)[:2] == ["micro-batch", "micro_batches"]
    assert "settings" in found(capsys, "settings")


@pytest.mark.parametrize(
    ("topic", "figures"),
    [
        ("K", ["stage 1 | .  F0 F1 F2 F3 .  .  B3 B2 B1 B0\n", "(K-1)/(M+K-1) = 2/6 = 33.3 %", "K = 8   87.5 %"]),
        ("micro_batches", ["M = 32\n", "in flight: at most 4 micro-batches on each stage"]),
        ("schedule=1f1b", ["stage 2 | .  .  F0 B0 F1 B1", "at most 3, 2, 1 micro-batches on stages 0, 1, 2"]),
        ("interleaved", ["K = 6 stages on 3 devices", "idle: 20.0 %"]),
        ("zero_bubble", ["I1 W0", "idle: 14.3 %"]),
        ("zbv", ["zero_bubble with placement=v", "K = 6 stages on 3 devices", "idle: 7.7 %"]),
        ("auto", ["recompute=auto  (gpipe train)\n    as few as", "orders that were tried the best for equal stages"]),
        ("recomputation", ["F3 R3", "at most 1 micro-batch on each", "1.17 times as long", "idle: 27.3 %"]),
        ("never", ["recompute=never  (gpipe train)\n    all", "activations: at most 4 micro-batches"]),
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


def test_words_are_those_of_the_glossary() -> None:
    known = glossary()
    assert {"bubble", "stage", "load imbalance", "recipe"} <= known.keys()
    assert [word for word, _ in topics()["words"]] == list(known)
    assert known["micro-batch"] == "one of the M pieces of a mini-batch (M, m)"
