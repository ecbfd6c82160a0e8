"""Runs that begin with the weights of another one, and layers that are not trained: what is loaded, and the laws."""

from pathlib import Path

import pytest
import torch
from training_runs import (
    NAMED,
    TINY,
    assert_same_tensors,
    command,
    configure,
    final_tensors,
    of_type,
    pipeline_of,
    state_of,
    train_here,
)

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.freezing import classifier_of, find_frozen
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.errors import InputError
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import StepDone, TrainingReady
from gpipe_cli.training.fine_tuning import find_weights, fine_tune

COMMON = [
    "dataset.image_size=16", "batch_size=8", "micro_batches=3", "data_workers=0", "threads=1", "device=cpu",
    "ema_decay=0.9", "gradient_clipping=0.05", "max_steps=3", "learning_rate.warmup_epochs=0",
]  # fmt: skip
# the last of its eight layers is the classifier
DIGITS = [*COMMON, "model=custom", "model.target=custom_models:small", "check_layers=false"]
FIRST, SECOND = "dataset.classes=[0,1,2,3]", "dataset.classes=[4,5,6,7]"
HERE = "executor=in_process"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on the digits 0 to 3, in two partitions."""
    folder = tmp_path_factory.mktemp("source")
    train_here(configure(*DIGITS, FIRST, HERE, "partitions=2"), folder)
    return folder


def begun(*settings: str) -> tuple[Engine, dict[str, torch.Tensor], dict[str, str]]:
    """The pipeline before its first step, all that it holds by name, and the lines of its banner."""
    config = configure(*settings, HERE)
    engine = pipeline_of(config)
    source = None if config.init_from is None else find_weights(config, print)
    notes = dict(fine_tune(engine, source))
    return engine, {name: tensor.clone() for name, tensor in state_of(engine).items()}, notes


def refused(config: TrainConfig) -> str:
    with pytest.raises(InputError) as caught:
        find_weights(config, print)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_but_the_classifier_is_taken(source: Path) -> None:
    """The averages of weights and statistics, and the counts that have none; for any cut. The rest is as the seed has
    it."""
    settings = [*DIGITS, SECOND, "seed=3"]
    engine, state, notes = begun(*settings, "partitions=3", f"init_from={source}")
    _, fresh, nothing = begun(*settings, "partitions=1")
    theirs = final_tensors(source)
    averages = {name for name in theirs if name.startswith("ema/")}
    for name in (name for name in state if name.startswith("model/")):
        average = name.replace("model/", "ema/", 1)
        expected = fresh[name] if name.startswith("model/7.") else theirs[average if average in averages else name]
        assert torch.equal(state[name], expected), name
        if average in averages:
            assert torch.equal(state[average], state[name]), average
    assert not torch.equal(state["model/0.weight"], fresh["model/0.weight"])
    assert state["model/2.num_batches_tracked"] == 3
    assert not any(name.startswith("optimizer/") for name in state)
    assert {average.updates for average in engine.averages.values()} == {0}
    assert notes == {
        "taken": f"3 layers from {source} (best, step 3, averaged weights)",
        "new": "1 layer: 7",
    }
    assert nothing == {}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (FIRST, True),
        ("dataset.classes=[0,1,3,4]", False),
        (f"{FIRST} init_head=new", False),
        (f"{SECOND} init_head=keep", True),
    ],
)
def test_the_classifier_is_kept_where_the_classes_are_the_same(settings: str, kept: bool, source: Path) -> None:
    _, state, notes = begun(*DIGITS, *settings.split(), f"init_from={source}", "seed=3")
    theirs = final_tensors(source)["ema/7.weight"]
    assert torch.equal(state["model/7.weight"], theirs) == kept
    assert notes["new"] == ("nothing, the classifier is that run's" if kept else "1 layer: 7")


def test_what_is_refused_is_said_in_one_line(source: Path) -> None:
    line = refused(configure("model=resnet", "model.depth=18", f"init_from={source}"))
    assert "step_00000003 is of another model (only here: " in line
    assert line.endswith("; use model=custom, as there")


@pytest.mark.parametrize("source_has_it", [False, True])
def test_an_auxiliary_head_may_be_on_one_side_only(source_has_it: bool, tmp_path: Path) -> None:
    settings, head = [*TINY, "max_steps=1", "init_head=keep"], "model.auxiliary_head="
    train_here(configure(*settings[:-1], HERE, f"{head}{source_has_it}"), tmp_path)
    _, state, notes = begun(*settings, f"{head}{not source_has_it}", f"init_from={tmp_path}")
    assert notes["new"] == ("nothing, the classifier is that run's" if source_has_it else "1 layer: auxiliary_head")
    for name in ("stem.0.weight", "classifier.logits.weight"):
        assert torch.equal(state[f"model/{name}"], final_tensors(tmp_path)[f"ema/{name}"])
    line = refused(configure(*settings, f"init_from={tmp_path}", "dataset.num_classes=5"))
    assert line.startswith("init_head=keep: classifier.logits.bias has shape (4,) in ")
    assert line.endswith(" and (5,) here; use init_head=new, or the same classes")


@pytest.mark.parametrize(
    ("model", "classifier"),
    [
        ("model=resnet model.depth=18", {"head.fc"}),
        ("model=timm model.name=test_convnext", {"head.head.fc"}),
        ("model=amoebanet model.auxiliary_head=true", {"classifier.logits", "auxiliary_head.logits"}),
        ("model=transformer_nmt dataset=synthetic_text model.shared_embedding=false", {"softmax.logits"}),
        ("model=custom model.target=custom_models:small", {"7"}),
    ],
)
def test_the_classifier_of_each_family(model: str, classifier: set[str]) -> None:
    config = configure("~presets", *model.split())
    names = classifier_of(config, build_model(config))
    assert names == {f"{module}.{name}" for module in classifier for name in ("weight", "bias")}


TEXT = [
    "~presets", "model=transformer_lm", "dataset=synthetic_text", "dataset.train_samples=24", "dataset.test_samples=6",
    "model.layers=3", "model.width=8", "model.hidden=12", "model.heads=2", "model.length=10", "batch_size=8",
    "micro_batches=3", "threads=1", "device=cpu", "max_steps=2", "ema_decay=0.9",
]  # fmt: skip


def test_a_vocabulary_must_be_the_same(tmp_path: Path) -> None:
    """And a run without averages gives its weights."""
    train_here(configure(*TEXT, "dataset.vocabulary=40", "ema_decay=0", HERE), tmp_path)
    _, state, notes = begun(*TEXT, "dataset.vocabulary=40", f"init_from={tmp_path}", "init_head=new")
    assert notes["new"] == "softmax.logits"
    assert torch.equal(state["model/embedding.weight"], final_tensors(tmp_path)["model/embedding.weight"])
    assert refused(configure(*TEXT, "dataset.vocabulary=41", f"init_from={tmp_path}")) == (
        f"init_from={tmp_path}: embedding.weight has shape (40, 8) there and (41, 8) here: with another vocabulary "
        "every token means something else; use dataset.vocabulary=40: text is then read with that run's vocabulary"
    )


def frozen(*settings: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    settings = settings if "model=timm" in settings else (*TINY, *settings)
    config = configure(*settings)
    found = find_frozen(config, build_model(config))
    return found.modules, found.parameters


def test_patterns_name_layers_modules_and_parameters() -> None:
    assert frozen() == frozen("freeze=[]") == ((), ())
    assert frozen("freeze=[stem,'cell_0[12]']") == (("stem", "cell_01", "cell_02"), ())
    assert frozen("freeze=[stem.1,stem]") == (("stem",), ()), "the module inside goes without saying"
    assert frozen("freeze=[stem.1,'stem.?.weight',classifier.logits.bias]") == (
        ("stem.1",),
        ("stem.0.weight", "classifier.logits.bias"),
    )
    head = frozen("freeze=[backbone]", "init_from=x", *TINY[2:], "model=timm", "model.name=test_efficientnet")[0]
    assert {name for name in head if name.startswith("head")} == {"head.conv_head", "head.bn2"}


def test_the_laws_hold_for_fine_tuning(source: Path, tmp_path: Path) -> None:
    """K does not matter, nor an interruption with another K, in this process or in several; and what is frozen stays,
    averages and statistics too: the first of three stages has nothing to train, the others do in part."""
    freeze = "freeze=['0','1','[27].bias']"
    settings = [*DIGITS, SECOND, f"init_from={source}", freeze, "max_steps=4"]
    heard = train_here(configure(*settings, HERE, "partitions=1"), tmp_path / "whole")
    whole = final_tensors(tmp_path / "whole")
    run = [*settings, "executor=distributed", "recompute=always", "partitions=3", "partition.balance=[2,2,4]"]
    run.append("stages_per_process=2")
    assert command("train", *run, "max_steps=2", f"run_folder={tmp_path / 'a'}") == 0
    train_here(configure(*settings, HERE, "partitions=2", f"resume={tmp_path / 'a'}"), tmp_path / "b")
    assert_same_tensors(final_tensors(tmp_path / "b"), whole)
    assert [label for label, _ in of_type(heard, TrainingReady)[0].notes] == ["taken", "new", "frozen"]

    _, before, _ = begun(*settings, "partitions=1")
    found = find_frozen(configure(*settings), build_model(configure(*settings)))
    inside = tuple(f"{module}." for module in found.modules)
    moved = [name for name in before if not torch.equal(before[name], whole[name])]
    still = [name for name in moved if (path := name.partition("/")[2]).startswith(inside) or path in found.parameters]
    assert not still, still[:5]
    assert any(name.startswith("model/7.") for name in moved)
    assert before.keys() == {name for name in whole if not name.startswith("optimizer/")}, "all tensors are there"
    assert not any(name.startswith(tuple(f"optimizer/{module}" for module in inside)) for name in whole)
    assert any(step.gradient_norm > 0.05 for step in of_type(heard, StepDone)), "clipping never acted"


def test_a_run_remembers_only_where_it_came_from(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reports what it loads. Evaluated or resumed, it does not need the other run again, which may be gone. When it
    is resumed, what was frozen can be trained, and what is frozen now no longer has optimizer state."""
    run = tmp_path / "run"
    settings = [*DIGITS, SECOND, HERE, f"init_from={source}", "freeze=[backbone]", "partitions=2", "max_steps=1"]
    assert command("train", *settings, f"run_folder={run}") == 0
    said = capsys.readouterr().out
    assert f"\ntaken        3 layers from {source} (best, step 3, averaged weights)\n" in said
    assert "\nnew          1 layer: 7\n" in said
    assert "; stage 0 has nothing to train\n" in said
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(source), str(tmp_path / "gone")))
    assert command("evaluate", f"run={run}", NAMED, "partitions=2") == 0
    changes = ["freeze=[7.bias]", "max_steps=2", f"run_folder={tmp_path / 'on'}"]
    assert command("train", f"resume={run}", NAMED, *changes) == 0
    first, second = final_tensors(run), final_tensors(tmp_path / "on")
    for name, thawed in (("0.weight", True), ("7.bias", False)):
        assert any(one.startswith(f"optimizer/{name}") for one in first) != thawed
        assert any(one.startswith(f"optimizer/{name}") for one in second) == thawed
        assert torch.equal(first[f"model/{name}"], second[f"model/{name}"]) != thawed
