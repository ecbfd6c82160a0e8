"""A run carries what its weights mean: the vocabulary of its text, and no need for what it began with."""

import json
import random
import re
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import timm
from image_files import picture_settings
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from training_runs import NAMED, SMALL, TINY, command, configure, spec_of

from gpipe_cli import load
from gpipe_cli.config.groups import TextConfig
from gpipe_cli.data.text import open_text
from gpipe_cli.distributed.rendezvous import Decision
from gpipe_cli.errors import InputError
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.results.files import read_result
from gpipe_cli.training.checkpoint.files import read_index
from gpipe_cli.training.train_loop import train

TEXT = [
    "~presets", "model=transformer_lm", "dataset=text_files", "model.layers=1", "model.width=8", "model.hidden=8",
    "model.heads=2", "model.length=8", "batch_size=8", "dataset.vocabulary=320", "threads=1", "device=cpu", "epochs=1",
    "partitions=2", "executor=in_process",
]  # fmt: skip


def nonsense(consonants: str, lines: int) -> str:
    """Lines of eight words of two syllables."""
    syllables = [consonant + vowel for consonant in consonants for vowel in "aeiou"]
    count = len(syllables)
    words = [syllables[i % count] + syllables[i * i % count] for i in range(2 * count)]
    return "\n".join(" ".join(words[(3 * i + 7 * j * j) % len(words)] for j in range(8)) for i in range(lines)) + "\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text(nonsense("bdfglmnr", lines=200))
    return tmp_path / "text"


def run(text: Path, folder: Path, *settings: str) -> int:
    places = [f"dataset.root={text}", f"dataset.cache={text.parent / 'cache'}", f"run_folder={folder}"]
    return command("train", *TEXT, *places, *settings)


def test_text_is_read_with_the_vocabulary_of_the_run(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One more file in the folder, and a newly learned vocabulary gave every token another meaning: the perplexity of a
    run went from 85 to 426 without a word."""
    assert run(text, tmp_path / "run") == 0
    saved_model = (tmp_path / "run" / "vocabulary.model").read_bytes()
    (text / "two.txt").write_text(nonsense("cjkpstvz", lines=200))
    assert command("evaluate", f"run={tmp_path / 'run'}") == 0
    other = TextConfig("text_files", 320, cache=str(text.parent / "other"), root=str(text))
    seen = {
        name: len(open_text(other, length=8, seed=0, saved_model=model)[1].predicted_tokens())  # type: ignore[union-attr]
        for name, model in (("saved", saved_model), ("anew", None))
    }
    assert seen["saved"] != seen["anew"], "the two vocabularies cannot be told apart by their tokens"
    assert read_result(tmp_path / "run", "evaluate.json")["tokens"] == seen["saved"]
    assert run(text, tmp_path / "tuned", f"init_from={tmp_path / 'run'}") == 0
    assert (tmp_path / "tuned" / "vocabulary.model").read_bytes() == saved_model
    capsys.readouterr()
    assert run(text, tmp_path / "resumed", f"resume={tmp_path / 'run'}", "dataset.vocabulary=319") == 2
    assert "use dataset.vocabulary=320" in capsys.readouterr().err


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Images of four colours, in a folder for each."""
    for split, name in product(("train", "test"), COLOURS):
        for number in range(4):
            pixels = np.array(COLOURS[name]) + np.random.default_rng(number).integers(-20, 20, (16, 16, 3))
            place = tmp_path / "photos" / split / name
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return tmp_path / "photos"


COLOURS = {"0": (255, 0, 0), "180": (0, 255, 0), "270": (255, 255, 0), "90": (0, 0, 255)}
PHOTOS = [
    "model=custom", "model.target=custom_models:small", "check_layers=false", "dataset=image_folder",
    "dataset.image_size=16", "dataset.augmentation.random_resized_crop=null", "batch_size=8", "data_workers=0",
    "threads=1", "device=cpu", "logger=[]", "executor=in_process", "partitions=2",
]  # fmt: skip


def loss_of(run: Path) -> float:
    assert command("evaluate", f"run={run}", NAMED) == 0
    return float(read_result(run, "evaluate.json")["loss"])


def test_outputs_mean_the_classes_that_they_were_trained_on(
    colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder was renamed, so that the classes stood in another order: an evaluation gave 0 % for 100 %, a resumed run
    trained on with other labels, and an exported file named other classes than its outputs have, all without a word.
    Numbers of dataset.classes mean other folders once there is one more."""
    run, settings = tmp_path / "run", [*PHOTOS, f"dataset.root={colours}"]
    assert command("train", *settings, "dataset.classes=[3,1,0,2]", "epochs=2", f"run_folder={run}") == 0
    loss = loss_of(run)
    for split in ("train", "test"):
        shutil.copytree(colours / split / "0", colours / split / "00")
    assert loss_of(run) == loss
    assert command("train", f"resume={run}", NAMED, "epochs=3", f"run_folder={tmp_path / 'resumed'}") == 0
    for split in ("train", "test"):
        shutil.rmtree(colours / split / "00")
        (colours / split / "0").rename(colours / split / "z0")
    capsys.readouterr()
    for words in (["evaluate", f"run={run}"], ["train", f"resume={run}", "epochs=3", f"run_folder={tmp_path / 'no'}"]):
        assert command(*words, NAMED) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"dataset\.root={colours}: .*only there: 0; only here: z0.*init_from", said)
    assert command("export", f"run={run}", NAMED) == 2
    with safe_open(run / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["90", "180", "0", "270"]
    begun = [*settings, f"init_from={run}", "max_steps=1"]
    assert command("train", *begun, f"run_folder={tmp_path / 'new'}") == 0
    assert "new          1 layer: 7" in capsys.readouterr().out
    for split in ("train", "test"):
        (colours / split / "z0").rename(colours / split / "0")
    assert command("train", *begun, f"run_folder={tmp_path / 'mapped'}") == 0
    assert "new          nothing" in capsys.readouterr().out
    (last,) = (tmp_path / "mapped" / "checkpoints").glob("step_*")
    assert read_index(last).classes == ("90", "180", "0", "270")


def test_a_run_that_kept_no_names_reports_it(colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*PHOTOS, f"dataset.root={colours}", "max_steps=1", f"run_folder={tmp_path / 'run'}"]
    assert command("train", *settings) == 0
    (index,) = (tmp_path / "run").glob("checkpoints/step_*/index.json")
    values = json.loads(index.read_text())
    assert values.pop("classes") == sorted(COLOURS)
    index.write_text(json.dumps(values))
    capsys.readouterr()
    assert command("evaluate", f"run={tmp_path / 'run'}", NAMED) == 0
    assert "classes      that run kept no names; its outputs are taken" in capsys.readouterr().out
    begun = [*PHOTOS, f"dataset.root={colours}", "max_steps=1", f"init_from={tmp_path / 'run'}", "init_head=new"]
    assert command("train", *begun, f"run_folder={tmp_path / 'begun'}") == 0
    assert "its outputs are taken" not in capsys.readouterr().out, "the classifier is new"
    resumed = tmp_path / "resumed"
    assert command("train", f"resume={tmp_path / 'run'}", NAMED, "max_steps=2", f"run_folder={resumed}") == 0
    assert "classes      that run kept no names" in capsys.readouterr().out
    assert command("evaluate", f"run={resumed}", NAMED, "checkpoint=last") == 0
    assert "kept no names" not in capsys.readouterr().out


def test_what_is_typed_takes_the_place_of_what_an_older_version_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pattern of Megatron's as partition.balance: evaluate, resume and export refused it, whatever was typed."""
    run = tmp_path / "run"
    assert command("train", *SMALL, "executor=in_process", "max_steps=1", f"run_folder={run}") == 0
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("  balance: null\n", "  balance: E t*2|t*2 L\n"))
    assert command("evaluate", f"run={run}", NAMED) == 0, "any cut evaluates it"
    assert command("export", f"run={run}", NAMED) == 0
    assert len(load(run, target="custom_models:small")) == 8
    resume = [f"resume={run}", NAMED, "max_steps=2"]
    capsys.readouterr()
    assert command("train", *resume, f"run_folder={tmp_path / 'no'}") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{run / 'config.yaml'}: partition.balance=E t*2|t*2 L: " in said
    assert said.endswith("give another on the command line, partition.balance=...")
    for number, typed in enumerate(("partitions=3", "partition.balance=[4,4]", "partition.balance=null")):
        assert command("train", *resume, typed, f"run_folder={tmp_path / str(number)}") == 0


def test_a_relative_path_of_data_starts_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From another folder the data of a run was not found, in the words of a training: with remedies that an evaluation
    does not take."""
    places = [tmp_path / name for name in ("first", "second", "third")]
    for place in places:
        place.mkdir()
    first, second, third = places
    settings = [*picture_settings(first / "images"), "partitions=1", "data_workers=1", "dataset.root=images"]
    monkeypatch.chdir(first)
    assert command("train", *settings, "run_folder=run", "max_steps=1") == 0
    monkeypatch.chdir(second)
    assert command("evaluate", f"run={first}/run", NAMED) == 0
    assert command("train", f"resume={first}/run", "run_folder=run", "max_steps=2", NAMED) == 0
    monkeypatch.chdir(third)
    assert command("evaluate", f"run={second}/run", NAMED) == 0
    moved = first.rename(tmp_path / "moved")
    capsys.readouterr()
    for run, root in ((moved, "images"), (second, str(first / "images"))):
        assert command("evaluate", f"run={run}/run", NAMED) == 2
        assert re.match(rf"gpipe evaluate: dataset.root={root}: .*give [^\n]*\n$", capsys.readouterr().err)
        assert command("evaluate", f"run={run}/run", NAMED, f"dataset.root={moved}/images") == 0
    monkeypatch.chdir(moved)
    assert command("evaluate", "run=run", NAMED) == 0


def test_other_data_need_a_test_set_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The remedies were settings of a training."""
    settings = [*picture_settings(tmp_path / "images"), "partitions=1", "data_workers=1", "max_steps=1"]
    assert command("train", *settings, "run_folder=split") == 0
    shutil.copytree(tmp_path / "images/train", tmp_path / "classes")
    no_split = [f"dataset.root={tmp_path}/classes", "dataset.test=0.25", "dataset.validation=null"]
    assert command("train", *settings, *no_split, "run_folder=whole") == 0
    shutil.rmtree(tmp_path / "images/val")

    assert command("evaluate", "run=split", NAMED) == 0
    assert command("evaluate", "run=whole", NAMED, f"dataset.root={tmp_path}/images") == 0
    capsys.readouterr()
    other = f"dataset.root={tmp_path}/classes"
    assert command("evaluate", "run=split", NAMED, other) == 2
    assert "give data with a test set" in capsys.readouterr().err
    assert command("evaluate", "run=split", NAMED, other, "dataset.test=0.5") == 0


def test_a_vocabulary_that_is_gone_is_not_learned_again(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token would mean something else."""
    assert run(text, tmp_path / "run", "max_steps=1") == 0
    (tmp_path / "run" / "vocabulary.model").unlink()
    capsys.readouterr()
    assert command("evaluate", f"run={tmp_path / 'run'}") == 2
    assert "vocabulary.model: there is no such file" in capsys.readouterr().err


def test_the_weights_that_a_run_began_with_may_be_gone(tmp_path: Path) -> None:
    """A checkpoint holds every tensor; the file was still asked for, and its absence refused. So was a schedule's file,
    which evaluation has no use for."""
    file = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=4).state_dict(), file)
    settings = [*TINY[2:], "model=timm", "model.name=test_resnet", f"model.weights={file}"]
    settings += ["executor=in_process", "freeze=[backbone]"]  # which asks for weights to have been taken
    order = tmp_path / "order.csv"
    order.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    by_file = ["partitions=2", "micro_batches=1", f"schedule={order}"]
    assert command("train", *settings, *by_file, "max_steps=1", f"run_folder={tmp_path / 'run'}") == 0
    file.unlink()
    order.unlink()
    assert command("evaluate", f"run={tmp_path / 'run'}", "partitions=1") == 0
    went_on = [f"resume={tmp_path / 'run'}", f"run_folder={tmp_path / 'on'}", "max_steps=2", "schedule=1f1b"]
    assert command("train", *went_on) == 0


def test_a_stage_in_the_middle_waits_while_text_is_prepared(text: Path, tmp_path: Path) -> None:
    """A vocabulary that takes longer to learn than `timeout_seconds` ended the run: stages without data gave up."""
    chance = random.Random(1)
    lines = (" ".join("".join(chance.choices("abcdefgh", k=6)) for _ in range(9)) for _ in range(5_000))
    (text / "long.txt").write_text("\n".join(lines))
    places = [f"dataset.root={text}", f"dataset.cache={tmp_path / 'cache'}"]
    config = configure(*TEXT, *places, "partitions=3", "executor=distributed", "max_steps=1")
    spec = spec_of(config)
    task = partial(train, config, spec, Decision(tmp_path, None, None))  # the command would read the text first
    assert run_task(task, spec, 3.0, lambda _: None) is None


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("reads_values", r"reads_values: fails when it is called on the meta device, .*no \.item\(\)"),
        ("returns_nested", r"layer 0 returns a tuple with a tuple; return a tensor or a tuple of tensors"),
    ],
)
def test_a_strange_model_of_ones_own_is_one_line(function: str, line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        spec_of(configure("model=custom", f"model.target=custom_models:{function}"))
    assert "\n" not in str(refused.value)
