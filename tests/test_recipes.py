"""Every recipe composes at every scale; the paper's models have the paper's sizes.

Recipes are trained elsewhere: `breakdown` by test_reproduce_command.py, `table1_transformer`, `consistency`,
`imagenet_amoebanet_b` and `batch_size_260k` by reproduction/.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from training_runs import command

from gpipe_cli.assembly.build import build_model
from gpipe_cli.commands.compose_config import strip_foreign_keys, training_config
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.reporting.reproduced.readme import BEGIN, END
from gpipe_cli.reporting.run.summary import describe_speed_kind
from gpipe_cli.reproduction import comparison, experiments
from gpipe_cli.reproduction.recipe import read_recipe, recipe_names
from gpipe_cli.reproduction.runner import RECIPES_DIR

ROOT = Path(__file__).parent.parent
EXPERIMENTS = Path(experiments.__path__[0])


def configure(name: str, *settings: str) -> tuple[TrainConfig, set[str]]:
    """The typed configuration as `gpipe train` has it, and what the user must give, to which a value was given."""
    with initialize_config_dir(str(RECIPES_DIR), version_base="1.3"):
        tree = compose(name, [*settings, "hydra.searchpath=[pkg://gpipe_cli.conf]"])
    strip_foreign_keys("train", tree)
    missing = OmegaConf.missing_keys(tree)
    for key in missing:
        OmegaConf.update(tree, key, "given")
    return training_config(tree, {})[0], missing


@pytest.mark.parametrize("name", recipe_names())
def test_all_scales_compose(name: str) -> None:
    recipe = read_recipe(name)
    config, missing = configure(name)
    assert missing <= {"dataset.root"}  # of data that are not public
    assert (config.init_from is not None) == name.startswith("transfer_")
    if recipe.needs.data is not None:
        assert (ROOT / "conf" / "dataset" / f"{recipe.needs.data}.yaml").is_file()
        assert config.dataset.name == recipe.needs.data
        assert recipe.needs.how
    assert config.partitions <= recipe.needs.gpus or name.startswith("table1") or not recipe.needs.gpus
    config, missing = configure(name, *recipe.settings("smoke"))  # those of scale=small, and more
    assert not missing
    # they come with the program
    assert config.dataset.name in ("digits", "cldr", "synthetic_images", "synthetic_text")


@pytest.mark.parametrize(
    "name",
    ["imagenet_amoebanet_b", "batch_size_1m", *(name for name in recipe_names() if name.startswith("multilingual_"))],
)
def test_the_full_model_has_the_paper_s_size(name: str) -> None:
    """To the paper's digits: 400M are 408M, 350M 343M."""
    values = read_recipe(name).values
    config, _ = configure(name, *values["counted"])
    counted = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert counted == pytest.approx(values["parameters"], rel=0.03)


def test_the_readme_says_what_the_recipes_say() -> None:
    """Its results were written with claims and notes that the recipes have worded differently since: `gpipe reproduce
    all` writes both again, and takes an hour and a half."""
    results = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    sections = dict(section.split("\n\n", 1) for section in results.split("\n### ")[1:])
    claims = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.yaml\) \| ([^|]*) \|", results, re.MULTILINE))
    recipes = {name: read_recipe(name) for name in recipe_names()}
    shared = f"{literals(inspect.getsource(comparison))} {literals(inspect.getsource(describe_speed_kind))}"
    shared += " scaled down; layers measured on this machine; took min on"
    assert claims == {name: recipe.claim for name, recipe in recipes.items()}
    for name, section in sections.items():
        recipe = recipes[name]
        about, *lines = section.splitlines()
        assert about == f"{recipe.title}: {recipe.claim}. Source: {recipe.source}."
        assert f"* paper's: {recipe.hardware}" in lines
        assert f"* scaled down: {recipe.small.scaled}" in lines or recipe.small.scaled not in section
        module = literals((EXPERIMENTS / f"{recipe.experiment}.py").read_text(encoding="utf-8"))
        known = words(f"{module} {shared} {recipe.hardware} {recipe.small.scaled} {recipe.values}")
        assert words(" ".join(line for line in lines if line.startswith("* "))) - known == set(), name


def literals(source: str) -> str:
    """The texts of a program but for docstrings."""
    texts = (node for node in ast.walk(ast.parse(source)) if not isinstance(node, ast.Expr))
    parts = (part.value for node in texts for part in ast.iter_child_nodes(node) if isinstance(part, ast.Constant))
    return " ".join(part for part in parts if isinstance(part, str))


def words(text: str) -> set[str]:
    """The words of a text that are not names, without the endings of plurals."""
    return {word.removesuffix("s") for word in re.findall(r"\b[a-z][a-z-]+\b", text)}


def test_the_figures_of_the_readmes_come_from_the_commands() -> None:
    """README.md had 2.95 where the command printed 2.94. Here the recipe that takes seconds is run; the figures of the
    others must at least be the same in both READMEs, of which `gpipe reproduce all` writes one."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    assert command("reproduce", "table3_no_fast_interconnect", "scale=small", "output=out") == 0
    (written,) = Path("out").glob("*/reproduction.md")
    lines = [line for line in written.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(lines) == 10
    assert [line for line in lines if f"{line}\n" not in results] == []
    cells = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|", readme, re.MULTILINE)
    quoted = {name: ours for name, ours, kind in cells if kind.startswith(("planned", "simulated"))}
    assert len(quoted) == 6
    for name, ours in quoted.items():
        section = results.partition(f"\n### {name}\n")[2].partition("\n### ")[0].replace(",", "")
        known = set(re.findall(r"\d[\d.]*[MB]?", re.sub(r"(?<=\d) (?=[MB]\b)", "", section)))
        assert set(re.findall(r"\d[\d.]*[MB]?", ours)) <= known, name


def test_what_is_said_of_the_differences_is_what_the_tables_have() -> None:
    """The sentences are written by hand."""
    results = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    said = " ".join(results.partition("\n## Where our numbers disagree")[2].partition("\n## ")[0].split())

    def pairs(name: str, title: str, ours: str) -> list[tuple[float, float]]:
        """The numbers in the columns `... paper` and `ours` of the tables of a recipe whose title has these words."""
        section = results.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        found = []
        for table in re.findall(rf"\*\*[^\n]*{title}[^\n]*\*\*\n\n((?:\|.*\n)+)", section):
            head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
            places = [next(at for at, cell in enumerate(head) if cell.endswith(end)) for end in ("paper", ours)]
            found += [tuple(float(row[at].replace(",", "")) for at in places) for row in rows]
        return found  # type: ignore[return-value]  # of two places

    def ratios(name: str) -> list[float]:
        return [ours / paper for paper, ours in pairs(name, "peak of the activations, all stages", "planned")]

    naive, *pipelines = ratios("table1_amoebanet")
    assert "half to two thirds" in said
    assert 0.47 < min(pipelines) < max(pipelines) < 0.67
    assert f"Naive-1 needs {naive:.1f} times the paper's; in bfloat16" in said
    naive, *pipelines = ratios("table1_transformer")
    assert f"agree within {100 * (max(pipelines) - 1):.0f} %" in said
    assert min(pipelines) > 1
    assert f"Naive-1 needs {naive:.1f} times the paper's." in said
    means = re.findall(r"(\d\.\d\d) \((Table \d|Figure 3)", said)
    of_tables = ("table2_amoebanet", "table2_transformer", "table3_no_fast_interconnect", "figure3_resnet101")
    for (mean, where), name in zip(means, of_tables, strict=True):
        apart = [abs(ours - paper) for paper, ours in pairs(name, "relative to", "Lingvo's cut, simulated")]
        compared = len(apart) - (2 if name.startswith("table3") else 1)  # each table's first row is 1 by definition
        assert float(mean) == pytest.approx(sum(apart) / compared, abs=0.0075), where
