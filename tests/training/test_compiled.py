"""compile=true: the laws hold, equal layers are compiled once, and what cannot be compiled is named."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_check_matrix import run_here
from training_runs import TINY, assert_same_tensors, command, configure, final_tensors, of_type, train_here

from gpipe_cli.commands import check_run
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.models.drop_path import ScheduledDropPath
from gpipe_cli.pipeline.runtime.compilation import compile_counts
from gpipe_cli.pipeline.runtime.executor import ActionFailedError
from gpipe_cli.results.files import read_result
from gpipe_cli.training.events import StepDone, TrainingReady

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
# two steps, of 1 + 1 samples each; every size would be compiled by itself, for seconds
SETTINGS = [
    *TINY[2:], "compile=true", "model=custom", "model.target=custom_models:blocks", "dataset.image_size=8",
    "dataset.num_classes=192", "dataset.train_samples=4", "dataset.test_samples=2", "batch_size=2", "micro_batches=2",
    "epochs=1", "check_layers=true", "learning_rate=constant",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For this process and for workers, whose server is started again; those of later tests may have it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        fork_server.kill()
        yield


@needs_compiler
def test_the_laws_hold_in_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One partition of which nothing is recomputed, and three of which all is, in a worker that finds what was
    compiled: the same bits, with batch norm and dropout; equal layers are compiled once. Only the last digits differ
    from compile=false."""
    way = [*SETTINGS, "executor=in_process", "partitions=1", "recompute=never"]
    before = compile_counts()
    messages = train_here(configure(*way), tmp_path / "whole")
    (ready,) = of_type(messages, TrainingReady)
    first = ready.compiled
    assert first is not None
    assert (first.layers, first.sizes) == (4, (1,))
    # a block whose input needs no gradient, the two others, and what flattens
    assert first.graphs == 3
    assert first.made
    counted = Counter(graphs=first.graphs, made=first.made, found=first.found)
    assert compile_counts() - before == counted, "none in a step"
    eager = train_here(configure(*way, "compile=false"), tmp_path / "eager")
    cut = [*SETTINGS, "executor=in_process", "partitions=3", "recompute=always"]
    assert command("train", *cut, f"run_folder={tmp_path}/cut") == 0

    whole, uncompiled = final_tensors(tmp_path / "whole"), final_tensors(tmp_path / "eager")
    assert_same_tensors(final_tensors(tmp_path / "cut"), whole)
    losses = [done.loss for done in of_type(messages, StepDone)]
    assert [done.loss for done in of_type(eager, StepDone)] == pytest.approx(losses, rel=1e-5)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, uncompiled[name], rtol=1e-3, atol=1e-5, msg=name)
    compiled = read_result(tmp_path / "cut")["compiled"]
    assert (compiled["graphs"], compiled["found"] > 0) == (3, True)
    monkeypatch.setattr(check_run, "run_task", run_here)
    one_sample = ["micro_batches=1", "batch_size=1", "partitions=2", "executor=in_process"]
    assert command("check", *SETTINGS, *one_sample) == 0
    assert "plain PyTorch is compared with compile=false only" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize("way", ["compile=true partitions=1", "compile=false partitions=1 check_layers=false",
                                 "compile=false partitions=2 executor=distributed"])  # fmt: skip
def test_a_batch_norm_that_is_applied_twice_is_refused(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["model.target=custom_models:norms_twice", "dataset.num_classes=4"]
    assert command("train", *SETTINGS, *twice, *way.split()) == 2
    captured = capsys.readouterr()  # what fails in a step is in the summary
    assert "layer 1.norm: a batch norm is applied twice in a forward, " in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err


@needs_compiler
def test_a_layer_that_changes_from_call_to_call_is_named(tmp_path: Path) -> None:
    """Every step compiled AmoebaNet's layers again, as their drop path read how much of the training was done: a step
    took 20 times as long. A layer of a user may do the same; AmoebaNet's no longer does."""
    few = [*SETTINGS, "micro_batches=1", "dataset.num_classes=4", "partitions=1", "epochs=9"]
    with pytest.raises(ActionFailedError, match=r"compile=true: layer 1 is compiled again.*compile=false$"):
        train_here(configure(*few, "model.target=custom_models:counts_its_calls"), tmp_path)
    path, x = ScheduledDropPath(0.0), torch.ones(1)
    del path.progress
    assert path(x) is x


def test_without_a_compiler_nothing_is_compiled(tmp_path: Path) -> None:
    from torch._inductor import config as inductor

    with (
        inductor.patch("cpp.cxx", ("/no/such/compiler",)),
        pytest.raises(InvalidSettingError, match=r"C\+\+.*compile=false$"),
    ):
        train_here(configure(*SETTINGS, "partitions=1"), tmp_path)


@pytest.mark.parametrize("settings", [["model=transformer_nmt"], ["model.drop_path=0.1"]])
def test_what_changes_in_every_step_is_refused(settings: list[str]) -> None:
    with pytest.raises(InvalidSettingError, match=r"compile=true: .*compile=false"):
        configure(*settings, "compile=true")


@needs_compiler
def test_skips_and_tied_weights_in_compiled_layers(tmp_path: Path) -> None:
    """A stage calls a `Stash` uncompiled."""
    given = [*SETTINGS, "model.target=custom_models:skips_one", "dataset.num_classes=4", "executor=in_process"]
    for partitions in (1, 2):
        train_here(configure(*given, f"partitions={partitions}"), tmp_path / str(partitions))
    assert_same_tensors(final_tensors(tmp_path / "2"), final_tensors(tmp_path / "1"))
