"""What holds for all tests.

What takes long to import is imported in fixtures: the process that hands tests out to others needs none of it.
"""

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

# The files that take longest, which begin first, so that at the end no core waits for one of them.
LONGEST = (
    "test_notebooks", "test_torchrun", "test_compiled", "test_quoted_lines", "test_measurements", "test_check_matrix",
    "test_pipeline", "test_failures", "test_readme", "test_hugging_face", "test_graphs", "test_what_belongs_to_a_run",
    "test_resuming", "test_machine_timing", "test_help_command", "test_imports", "test_train_loop", "test_text",
    "test_laws", "test_races", "test_fine_tuning", "test_reproduce_command", "test_consistency", "test_published",
    "test_sweep", "test_cli", "test_replicas", "test_extending", "test_contributing", "test_forks", "test_supervisor",
    "test_plan_command", "test_check_against", "test_check_command", "test_unwritten", "test_saved_activations",
    "test_timm", "test_deadlocks", "test_bench", "test_names", "test_tokenizer", "test_chrome_trace", "test_view",
    "test_engine", "test_background_writer", "test_auto_settings", "test_compare_command", "test_slurm", "test_skips",
    "test_tied_weights", "test_notebook_objects", "test_next_commands", "test_random_orders", "test_stage_graphs",
)  # fmt: skip

# Commands start their own processes, also where the tests themselves are started by something that sets these.
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)

# Torch would try each set of vector instructions of the CPU in a separate Python, which imports torch.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Bit-equality is promised at the same number of threads, and the stages have one."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def trees_are_composed_once() -> Iterator[None]:
    """Hydra takes 0.2 s to compose a configuration. One that includes a test's own files, and not only recipes, is
    composed every time."""
    from gpipe_cli.commands import compose_config

    compose, trees = compose_config._compose_with_hydra, dict[tuple[str, ...], Any]()
    recipes = Path(__file__).parent.parent / "recipes"

    def composed(line: Any, chosen: tuple[str, ...]) -> Any:
        folders = {folder.resolve() for folder in compose_config._user_folders(line)}
        if not folders <= {recipes}:
            return compose(line, chosen)
        key = (line.command, str(line.options["config_name"]), *map(str, folders), *chosen)
        return trees[key] if key in trees else trees.setdefault(key, compose(line, chosen))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose_config, "_compose_with_hydra", composed)
        yield


@pytest.fixture(autouse=True, scope="session")
def amoebanets_are_traced_once() -> Iterator[None]:
    """To trace the smallest takes 1.5 s. What a user's own model is may change from test to test."""
    from gpipe_cli.config.groups import AmoebaNetConfig
    from gpipe_cli.planner import model_profile

    trace = model_profile._profile.__wrapped__
    of_amoebanets, of_others = lru_cache(maxsize=None)(trace), lru_cache(maxsize=16)(trace)

    def profile(traced: Any, lengths: tuple[int, ...]) -> Any:
        return (of_amoebanets if type(traced.config.model) is AmoebaNetConfig else of_others)(traced, lengths)

    profile.cache_clear = lambda: (of_amoebanets.cache_clear(), of_others.cache_clear())  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_profile, "_profile", profile)
        yield


@pytest.fixture(autouse=True)
def pictures_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes 0.4 s for each run. The tests in `reporting` look at pictures, and do draw them."""
    import numpy as np

    from gpipe_cli.reporting.plots import picture

    monkeypatch.setattr(picture, "to_pixels", lambda _: np.zeros((1, 1, 3), np.uint8))


@pytest.fixture(autouse=True)
def machine_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in the test process plan by the figures of hardware=cpu: to time layers takes seconds for each
    of them. `benchmark/test_machine_timing.py` and the processes that tests start do time them."""
    from gpipe_cli.benchmark import machine_timing

    monkeypatch.setattr(machine_timing, "_layer_times", lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make 350,000 objects that live to the end: without collections between them they take 1.5 CPU seconds
    less, and none of the collections later looks at them again."""
    import gc

    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
