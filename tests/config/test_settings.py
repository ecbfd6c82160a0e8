"""The configuration: YAML, dataclasses and what is refused."""

import os
import re
import tomllib
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import yaml
from training_runs import composed as tree
from training_runs import configure as train

from gpipe_cli.commands.evaluate import run_settings
from gpipe_cli.commands.folders import run_folder
from gpipe_cli.commands.train import make_request, resumed_config
from gpipe_cli.config.groups import group_choice
from gpipe_cli.config.pipeline_settings import Affects
from gpipe_cli.config.settings import (
    PER_INVOCATION,
    BenchSettings,
    EvaluateSettings,
    TrainConfig,
    load_run_config,
    settings_affecting,
    to_yaml,
)
from gpipe_cli.errors import InputError

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 1, 31, 12, 0, 5)


def save(config: TrainConfig, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


def test_every_setting_is_explained_and_every_file_of_a_group_is_one_of_its_choices() -> None:
    names = {"name", "horizontal_flip"}  # they explain themselves
    for file in (ROOT / "conf").rglob("*.yaml"):
        if file.parent.name == "presets":  # it chooses values of settings that are explained elsewhere
            continue
        for line in file.read_text().partition("\nhydra:")[0].splitlines():
            key, _, rest = line.strip().partition(":")
            assert not rest.strip() or key.startswith(("#", "-")) or key in names or "#" in rest, line
        if file.parent.name != "conf":
            read = yaml.safe_load(file.read_text())
            name = read.get("name") or read["model"]["name"]  # resuming a run relies on it
            assert name == {"timm": "???", "hf": "???"}.get(file.stem, file.stem)


def test_types_survive_yaml(tmp_path: Path) -> None:
    config = train(
        "partition.balance=[4,8]", "gradient_clipping=1", "dataset.augmentation.random_resized_crop=[0.5,1]",
        "init_from=outputs/a", "freeze=[stem,'cell_0*',backbone]", "init_head=new",
    )  # fmt: skip
    assert config.partition.balance == (4, 8)
    assert isinstance(config.gradient_clipping, float)
    assert config.dataset.augmentation.random_resized_crop == (0.5, 1.0)
    assert config.freeze == ("stem", "cell_0*", "backbone")
    assert load_run_config(save(config, tmp_path / "run")) == config
    one = train("partition.balance=10", "partition.costs=2", "dataset.classes=3", "freeze=stem", "logger=mlflow")
    assert (one.partition.balance, one.partition.costs, one.dataset.classes) == ((10,), (2.0,), (3,))
    assert (one.freeze, one.logger) == (("stem",), ("mlflow",)), "a list of one member needs no brackets"
    assert train("logger=[]").logger == ()
    timm = train("model=timm", "model.name=resnet18", "freeze=[backbone]", "model.pretrained=true")
    assert timm.freeze == ("backbone",), "weights of timm count as taken"
    for config in (timm, train("model=hf", "model.name=a/b", "model.config={vocab_size: 9}")):  # both have any name
        assert load_run_config(save(config, tmp_path / group_choice(config.model))) == config


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # one of each kind of check
        ("+dataset.augmentation.cutot=3", "did you mean dataset.augmentation.cutout?"),
        ("partitions=two", "partitions=two: must be a whole number; for example partitions=4"),
        ("partitions=0", "must be 1 or more and at most 10000, as no model has more layers; use partitions=1"),
        ("output=''", "output=: must be a text of one line that is not empty"),
        ("label_smoothing=1", "label_smoothing=1.0: must be 0 or more and below 1"),
        ("partition.balance=2.5", "partition.balance=2.5: must be a list; for example partition.balance=[1,1]"),
        # settings that do not go together
        ("micro_batches=64", "batch_size=32 samples; use micro_batches=32 or fewer, or batch_size=64 or more"),
        ("replicas=33", "replicas=33: "),
        ("init_head=keep", "init_head=keep: no weights are taken, as init_from=null; give init_from=..."),
        ("dataset=cifar10 dataset.root=null", "dataset.root=null: dataset=cifar10 needs a value"),
        ("dataset=cldr", "model=amoebanet: takes images, and dataset=cldr is text; use model=transformer_nmt"),
        # (the command itself replaces the preset's batch_tokens)
        ("model=transformer_nmt batch_size=64", "batch_size=64, batch_tokens=2048: both are given; add"),
        ("placement=v schedule=interleaved", "placement=v: schedule=interleaved is made for placement=looped; remove"),
    ],
)
def test_bad_values_are_one_line(overrides: str, line: str) -> None:
    with pytest.raises(InputError, match=re.escape(line)) as error:
        train(*overrides.split())
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("kind", [TrainConfig, EvaluateSettings, BenchSettings])
def test_every_number_has_bounds(kind: type) -> None:
    """`data_workers=100000` once started as many processes, and `timeout_seconds=1e300` overflowed in a worker."""

    def unbounded(hint: Any, name: str) -> list[str]:
        if get_origin(hint) is Annotated:
            return []
        if isinstance(hint, type) and is_dataclass(hint):
            hints = get_type_hints(hint, include_extras=True)
            return [f"{name}.{found}" for key, inner in hints.items() for found in unbounded(inner, key)]
        return [name] if hint in (int, float) else [one for inner in get_args(hint) for one in unbounded(inner, name)]

    # classes are numbers of the data set, which knows how many it has
    assert set(unbounded(kind, kind.__name__)) <= {"TrainConfig.dataset.classes"}


def test_class_folders_are_counted_once(tmp_path: Path) -> None:
    """dataset=image_folder wanted to be told what it could see. A run keeps the number, whatever comes later."""
    given = ("dataset=image_folder", f"dataset.root={tmp_path}")
    for name in ("cat", "dog", ".ipynb_checkpoints", "eel"):
        (tmp_path / "train" / name).mkdir(parents=True)
    (tmp_path / "train" / "readme.txt").touch()
    config = train(*given)
    assert config.dataset.num_classes == 3
    (tmp_path / "train" / "fox").mkdir()
    assert load_run_config(save(config, tmp_path / "run")).dataset.num_classes == 3
    assert train(*given, "dataset.num_classes=7").dataset.num_classes == 7
    # train and test were taken for two classes, which the model was blamed for
    assert train(*given, "dataset.test=0.2").dataset.num_classes == 4
    flat = ("dataset=image_folder", f"dataset.root={tmp_path / 'train'}")
    assert train(*flat, "dataset.test=0.2").dataset.num_classes == 4
    with pytest.raises(InputError, match=r"dataset\.test=0\.2"):
        train(*flat)


def test_a_run_from_before_a_setting_can_be_resumed(tmp_path: Path) -> None:
    """`stages_per_process: the setting is missing; give ...`, and giving it did not help. A placement may be a file."""
    config = train()
    since = ("precision", "deterministic", "compile", "stages_per_process", "  tf32_tflops", "  bfloat16_tflops")
    lines = to_yaml(config).splitlines(keepends=True)
    older = [line for line in lines if not line.startswith(tuple(f"{key}:" for key in since))]
    assert len(older) == len(lines) - len(since)
    (tmp_path / "config.yaml").write_text("".join(older).replace("placement: null", "placement: own.csv"))
    assert load_run_config(tmp_path) == config


def test_resume_keeps_the_run_and_takes_what_is_given() -> None:
    saved = train("partitions=3", "epochs=9", "dataset=cifar10", "dataset.root=/x", "model.filters=32", "max_steps=5")
    now = tree("resume=run", "micro_batches=8", "dataset=cifar10", "model.dropout=0.1")
    config = resumed_config(saved, now, ["resume", "micro_batches", "dataset", "model.dropout"])
    assert (config.partitions, config.epochs, config.micro_batches) == (3, 9, 8)
    assert config.dataset == saved.dataset  # the same choice, so the run's own settings
    assert config.model == replace(saved.model, dropout=0.1)
    assert config.resume == "run"
    assert config.max_steps is None  # where the run stopped is not a setting of the resumed run
    other = resumed_config(saved, tree("dataset=cifar100", "dataset.root=/y"), ["dataset", "dataset.root"])
    assert other.dataset == train("dataset=cifar100", "dataset.root=/y").dataset  # another choice: the whole group


def test_what_is_given_of_a_cut_takes_the_place_of_the_run_s() -> None:
    by_rule, by_hand = train("partition.method=lingvo"), train("partition.balance=[4,8]")
    key = "partition.balance"
    assert resumed_config(by_rule, tree(f"{key}=[4,8]"), [key]).partition == by_hand.partition
    assert resumed_config(by_hand, tree("partition.method=lingvo"), ["partition.method"]).partition == by_rule.partition


def test_a_run_keeps_the_mini_batch_that_was_chosen_when_it_began(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(train("batch_size=52", "hardware.memory_gib=1")))
    given = {"batch_size": "auto", "resume": str(tmp_path), "epochs": 9}
    request = make_request(tree(*(f"{key}={value}" for key, value in given.items())), given)
    assert (request.config.batch_size, request.config.epochs, request.auto) == (52, 9, ())


def test_resume_with_other_partitions_drops_the_balance() -> None:
    saved = train("partition.balance=[4,8]")
    assert resumed_config(saved, tree("epochs=9"), ["epochs"]).partition.balance == (4, 8)
    assert resumed_config(saved, tree("partitions=3"), ["partitions"]).partition.balance is None
    given = ["partitions", "partition.balance"]
    assert resumed_config(saved, tree("partitions=3", "partition.balance=[4,4,4]"), given).partition.balance == (
        4,
        4,
        4,
    )
    several = train("partitions=6", "stages_per_process=3")
    assert resumed_config(several, tree("partitions=3"), ["partitions"]).stages_per_process == 3
    assert (
        resumed_config(several, tree("partitions=2"), ["partitions"]).stages_per_process is None
    )  # there are fewer stages


def evaluate(run: Path, *overrides: str) -> Any:
    return run_settings(EvaluateSettings, tree(f"run='{run}'", *overrides, command="evaluate"))[1]


def test_evaluate_is_the_run_with_what_is_given(tmp_path: Path) -> None:
    saved = train("partitions=2", "partition.balance=[4,8]", "dataset=cifar10", "executor=in_process")
    run = save(saved, tmp_path / "run")
    assert evaluate(run) == replace(saved, schedule="1f1b")  # which any number of partitions has
    config = evaluate(run, "partitions=5", "dataset.root=/y", "checkpoint=last")
    assert config.partition.balance is None  # it was for two partitions
    assert (config.partitions, config.dataset.root, config.executor) == (5, "/y", "in_process")
    three = save(train("partitions=3", "stages_per_process=3"), tmp_path / "three")  # for other processes than now
    assert evaluate(three).stages_per_process is None
    assert evaluate(three, "stages_per_process=2").stages_per_process == 2
    text = save(train("model=transformer_nmt"), tmp_path / "text")
    config = evaluate(text, "batch_size=16")
    assert (config.batch_size, config.batch_tokens) == (16, None)


def open_folder(config: TrainConfig) -> None:
    with run_folder(config, NOW):
        pass


def test_run_folders_do_not_collide(tmp_path: Path) -> None:
    config = replace(train(), output=str(tmp_path / "new" / "outputs"))
    stem, outputs = "2026-01-31_12-00-05_amoebanet_digits_K2_M4", tmp_path / "new" / "outputs"
    with run_folder(config, NOW) as one, run_folder(config, NOW) as two, run_folder(config, NOW) as three:
        assert [one.name, two.name, three.name] == [stem, f"{stem}-2", f"{stem}-3"]
        assert set(outputs.iterdir()) == {one, two, three}
    assert not (tmp_path / "new").exists(), "nothing was written"


def test_a_chosen_run_folder_must_be_new_or_the_run_that_goes_on(tmp_path: Path) -> None:
    run = save(train(), tmp_path / "run")
    config = replace(train(), run_folder=str(run))
    with pytest.raises(InputError, match=r"run_folder=.*: the folder is not empty; .*resume="):
        open_folder(config)
    goes_on = replace(config, resume=str(run))
    with run_folder(goes_on, NOW) as folder:
        assert folder == run
        # two runs in one folder took each other's checkpoints away
        with pytest.raises(InputError, match=rf"^resume={run}: process {os.getpid()} .*wait"):
            open_folder(goes_on)
    with run_folder(replace(config, run_folder=str(tmp_path / "a" / "b")), NOW) as folder:
        assert folder.is_dir()
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_every_package_is_installed() -> None:
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    files = [*ROOT.glob("gpipe_cli/**/*.py"), *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("recipes/*.yaml")]
    files += ROOT.glob("recipes/family/*.yaml")
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in files}
    assert {re.sub("^(conf|recipes)", r"gpipe_cli.\1", folder) for folder in folders} == named


PAPERS = "preset=None model.width=2048 model.hidden=8192 model.heads=32 model.length=1024"
BROUGHT = "optimizer.name=adam learning_rate.name=inverse_sqrt preset=small"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("model=transformer_lm", f"task=language_model dataset.name=python_docs {BROUGHT}"),
        ("model=transformer_nmt", f"task=translation dataset.name=cldr {BROUGHT}"),
        # what is typed wins, and the rest of the preset holds, whatever the learning rate has of a warm-up
        ("model=transformer_lm optimizer=sgd model.layers=6", "optimizer.name=sgd model.layers=6 preset=small"),
        # without a preset sizes are the paper's
        ("model=transformer_lm dataset=synthetic_text", PAPERS),
        # a newcomer's text file was given the paper's 184 million parameters
        ("model=transformer_lm dataset=text_files dataset.root=x", "model.width=128 dataset.vocabulary=4000"),
    ],
)
def test_a_transformer_brings_what_suits_it(overrides: str, expected: str) -> None:
    config = train(*overrides.split())
    wanted = dict(one.split("=") for one in expected.split())
    assert {key: str(attrgetter(key)(config)) for key in wanted} == wanted


def test_each_setting_says_what_depends_on_it() -> None:
    """In place of lists of names in six files, in some of which a new setting was silently wrong."""
    assert all(isinstance(setting.metadata["affects"], Affects) for setting in fields(TrainConfig))
    assert set(settings_affecting(Affects.SECONDS)) <= set(settings_affecting(Affects.LAYERS)), (
        "what is timed is traced"
    )
    assert set(PER_INVOCATION) == {"resume", "max_restarts", "run_folder", "output", "dry_run", "quiet", "max_steps"}
    assert {"partitions", "micro_batches", "seed", "threads"}.isdisjoint(settings_affecting(Affects.LAYERS))
