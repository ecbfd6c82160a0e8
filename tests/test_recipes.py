"""Every recipe: composed at both scales, the paper's model counted, and one step of the desk's version trained."""

from pathlib import Path

import pytest
from recipe_runs import HERE, compose_recipe, merged
from training_runs import train_here

from gpipe_cli.assembly.build import build_model
from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.config.model import AmoebaNetConfig, ResNetConfig
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.reproduction.recipe import FOLDER, load, names
from gpipe_cli.reproduction.training import Training

ROOT = Path(__file__).parent.parent
RECIPES = names()
PAIRS = [(f"Haus{n} am See", f"house{n} by the lake", "de-en") for n in range(30)]
# What takes long and is not what a recipe is about.
SMALL_IMAGES = ("dataset.image_size=16", "batch_size=8", "micro_batches=2", "checkpoint.every_epochs=0")
SMALL_TEXT = ("model.width=16", "model.hidden=32", "model.heads=2", "micro_batches=2", "checkpoint.every_epochs=0")
SMALL_NOISE = ("batch_size=8", "dataset.train_samples=8", "dataset.test_samples=8")


def configure(name: str, *settings: str) -> tuple[TrainConfig, set[str]]:
    """The typed configuration, and what the user must give."""
    tree, missing = compose_recipe(name, *settings)
    return from_tree(TrainConfig, tree), set(missing)


def desk(name: str, *settings: str) -> TrainConfig:
    return configure(name, *merged(*load(name).desk.settings, *settings))[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few pairs of sentences in the place of CLDR's names, which take a minute to read for the first time."""
    root = tmp_path_factory.mktemp("pairs")
    for part, rows in (("train", PAIRS[5:]), ("test", PAIRS[:5])):
        (root / f"{part}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all fine-tuning begins with."""
    folder = tmp_path_factory.mktemp("pretrained")
    given = ("init_from=null", "dataset.classes=[0,1,2,3,4]", "max_steps=1", *SMALL_IMAGES, *HERE)
    train_here(desk("transfer_cifar10", *given, "checkpoint.every_epochs=1"), folder)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_the_paper_s_scale_composes(name: str) -> None:
    recipe = load(name)
    config, missing = configure(name)
    assert missing <= {"dataset.root"}  # of data that are not public
    assert (config.init_from is not None) == name.startswith("transfer_")
    if recipe.needs.data is not None:
        assert (ROOT / "conf" / "dataset" / f"{recipe.needs.data}.yaml").is_file()
        assert config.dataset.name == recipe.needs.data
        assert recipe.needs.how
    assert config.partitions <= max(recipe.needs.gpus, 1) or name.startswith("table1")


@pytest.mark.parametrize("name", RECIPES)
def test_the_desk_s_scale_composes_and_needs_no_data(name: str) -> None:
    recipe = load(name)
    assert len(merged(*recipe.desk.settings)) == len(recipe.desk.settings), "a setting twice"
    config, missing = configure(name, *recipe.desk.settings)
    assert not missing
    assert config.dataset.name in ("digits", "python_docs", "cldr", "synthetic_images", "synthetic_text")


@pytest.mark.parametrize("name", RECIPES)
def test_the_file_says_how_to_run_it(name: str) -> None:
    head = (FOLDER / f"{name}.yaml").read_text().partition("\ndefaults:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"gpipe reproduce {name}" in head
    assert f"-cd recipes -cn {name}" in head


@pytest.mark.parametrize("name", [name for name in RECIPES if isinstance(load(name).experiment, Training)])
def test_the_full_model_has_the_paper_s_size(name: str) -> None:
    """To the paper's digits: 400M are 408M, 350M 343M."""
    training = load(name).experiment
    assert isinstance(training, Training)
    settings = training.size.settings if training.size else ("dataset=synthetic_images", "model.auxiliary_head=false")
    parameters = training.size.parameters if training.size else 557_000_000
    config, _ = configure(name, *settings)
    counted = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert counted == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize("name", RECIPES)
def test_the_desk_s_version_trains_a_step(
    name: str, tmp_path: Path, pairs: Path, request: pytest.FixtureRequest
) -> None:
    config = desk(name, "max_steps=1", *HERE)
    more: list[str] = ["max_steps=1", *HERE]
    if isinstance(config.dataset, TextConfig):
        more += SMALL_TEXT
        if config.dataset.name == "cldr":
            more += ["dataset=parallel_text", f"dataset.root={pairs}", "dataset.vocabulary=288", "batch_tokens=200"]
            more += [f"dataset.cache={pairs}", f"model.layers={min(2, config.model.layers)}"]  # type: ignore[union-attr]
    else:
        more += SMALL_IMAGES
        if isinstance(config.model, ResNetConfig):
            more += ["model.depth=18"]
        elif isinstance(config.model, AmoebaNetConfig):
            more += [f"model.normal_cells={min(6, config.model.normal_cells)}"]
    if config.dataset.name.startswith("synthetic"):
        more += SMALL_NOISE
    if config.dataset.name == "digits":
        more += ["dataset.classes=[5,6,7,8,9]"]
    if name.startswith("transfer_"):
        more += [f"init_from={request.getfixturevalue('pretrained')}"]
    heard = train_here(desk(name, *more), tmp_path / "run")
    assert sum(kind == "step" for kind, _ in heard) == 1
