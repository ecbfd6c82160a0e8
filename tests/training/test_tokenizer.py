"""Trainings on the tokens of a Hugging Face tokenizer, which may have changed when they are resumed."""

import base64
import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizer_files import LINES, write_tokenizer
from training_runs import assert_same_tensors, command, final_tensors
from transformers import AutoTokenizer

from gpipe_cli.config.settings import read_config
from gpipe_cli.results.files import read_result

TEXT = [
    "~presets", "model=transformer_lm", "dataset=text_files", "model.layers=1", "model.width=8", "model.hidden=8",
    "model.heads=2", "model.length=8", "batch_size=8", "threads=1", "device=cpu", "epochs=1", "micro_batches=2",
    "partitions=2", "executor=in_process", "hardware=cpu", "logger=[]",
]  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """The settings of a text and a tokenizer."""
    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    place = write_tokenizer(tmp_path / "tokenizer", eos_token="<end>")
    return [f"dataset.root={tmp_path / 'text.txt'}", f"dataset.cache={tmp_path}", f"dataset.tokenizer={place}"]


def test_a_run_reads_text_with_the_tokenizer_that_it_began_with(
    places: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    assert command("train", *TEXT, *places, "max_steps=4", f"run_folder={whole}") == 0
    size = len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    assert f"{size} tokens of {tmp_path / 'tokenizer'}" in capfd.readouterr().out
    assert read_config(whole).dataset.vocabulary == size  # type: ignore[union-attr]
    assert command("train", *TEXT, *places, "max_steps=2", f"run_folder={begun}") == 0

    write_tokenizer(tmp_path / "tokenizer", lines=["another text gives other pieces " * 9], eos_token="<end>")
    assert command("train", f"resume={begun}", "max_steps=4", f"run_folder={tmp_path / 'on'}") == 0
    assert_same_tensors(final_tensors(tmp_path / "on"), final_tensors(whole))
    on = tmp_path / "on"
    assert command("evaluate", f"run={on}", "checkpoint=last") == 0
    assert read_result(on, "evaluate.json")["loss"] == read_result(whole)["test"]["loss"]
    assert command("export", f"run={on}", f"file={tmp_path / 'model.safetensors'}") == 0
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        exported = {name: base64.b64decode(text) for name, text in json.loads(file.metadata()["tokenizer"]).items()}
    assert exported == {path.name: path.read_bytes() for path in (whole / "tokenizer").iterdir()}

    own = f"dataset.tokenizer={on / 'tokenizer'}"
    assert (
        command("train", *TEXT, *places, own, f"init_from={on}", "max_steps=1", f"run_folder={tmp_path / 'new'}") == 0
    )
    capfd.readouterr()
    other = f"dataset.tokenizer={write_tokenizer(tmp_path / 'other', eos_token='<end>')}"
    for setting in (f"resume={on}", f"init_from={on}"):
        assert command("train", *TEXT, *places, other, setting, f"run_folder={tmp_path / 'no'}") == 2
        assert f"use {own} dataset.vocabulary={size}\n" in capfd.readouterr().err
    (on / "tokenizer").rename(tmp_path / "away")
    assert command("evaluate", f"run={on}") == 2
    assert str(on / "tokenizer") in capfd.readouterr().err


def test_token_0_is_trained_on_and_counted(places: list[str], tmp_path: Path) -> None:
    """Were it taken for padding, as in a vocabulary of our own, there would be nothing to learn in this text."""
    (tmp_path / "text.txt").write_text("! " * 2000 + "\n", encoding="utf-8")
    place = write_tokenizer(tmp_path / "tokenizer", lines=["none"], eos_token="<end>")
    tokens = AutoTokenizer.from_pretrained(place)("! " * 200 + "\n", add_special_tokens=False)["input_ids"]
    assert tokens.count(0) == 200
    settings = [*TEXT, *places, "learning_rate=constant", "learning_rate.peak=0.03", f"run_folder={tmp_path / 'run'}"]
    assert command("train", *settings) == 0
    test = read_result(tmp_path / "run")["test"]
    assert test["tokens"] == len(tokens)  # each but the first, and the end
    assert test["token_accuracy"] > 0.9
