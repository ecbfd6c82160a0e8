"""`gpipe check` itself: the engine is right for every family of models, and where it is not, the command reports it.

Every test of the engine's parts was green while the command called it wrong for tied weights, for Hugging Face and for
replicas.
"""

import importlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from planted_faults import FAULTS, with_fault
from training_runs import command, configure, train_here

from gpipe_cli.commands import check_run
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.launch.job import Failure, Task
from gpipe_cli.launch.supervisor import OnMessage, run_task
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.training.engine import WorkerProcess
from gpipe_cli.verify import self_check

SMALL = [
    "partitions=2", "micro_batches=2", "batch_size=8", "executor=in_process", "threads=1", "device=cpu", "logger=[]",
    "data_workers=0",
]  # fmt: skip
THREE, APART, REPLICAS, BF16 = "partitions=3", "executor=distributed", "replicas=2", "precision=bfloat16"
SAMPLES = ["dataset.train_samples=8", "dataset.test_samples=4"]
IMAGES = ["dataset=synthetic_images", "dataset.image_size=16", "dataset.num_classes=4", *SAMPLES]
TIMM = [*IMAGES, "dataset.image_size=32", "model=timm"]
MASKS = ["dataset=synthetic_masks", "dataset.image_size=8", *SAMPLES]
CUSTOM = [*IMAGES, "model=custom", "model.target=custom_models:small", "partition.balance=[2,6]"]
SKIPS = [*IMAGES, "model=custom", "model.target=custom_models:hourglass"]
TEXT = ["~presets", "dataset=synthetic_text", "dataset.vocabulary=40", *SAMPLES]
PAIRS = ["~presets", "dataset=parallel_text", "dataset.root=pairs", "dataset.cache=cache", "dataset.vocabulary=270"]
TRANSFORMER = ["model.layers=1", "model.width=8", "model.hidden=16", "model.heads=2", "model.length=12"]
LM = [*TEXT, "model=transformer_lm", *TRANSFORMER]
NMT = [*PAIRS, "model=transformer_nmt", *TRANSFORMER]
TIED, SHARED = "model.tie_embeddings=true", ["model.shared_embedding=false", "model.share_vocabularies=true"]
# whose layers equal another model's except for a detail
ALIKE = [f"hf {name}" for name in ("mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi3", "smollm3")]
# A run for each model, with any two of THREE, APART, REPLICAS and BF16 in some of them; those of Hugging Face are the
# configurations of test_hugging_face.py.
RUNS = {
    "amoebanet": [*IMAGES, "model.normal_cells=3", "model.filters=4", "model.drop_path=0.4", "model.dropout=0.2"],
    "resnet": [*TIMM, "model=resnet", "model.depth=18", BF16],
    "timm CNN": [*TIMM, "model.name=test_efficientnet", BF16],
    "timm ViT": [*TIMM, "model.name=vit_tiny_patch16_224", "model.drop_path=0.2"],
    "U-Net": [*MASKS, "model=unet", "model.depth=1", "model.base_channels=2", "model.num_convs=1", APART],
    "custom": [*CUSTOM[:-1], "freeze=['0']", THREE, REPLICAS],
    "odd": [*IMAGES, "model=custom", "model.target=custom_models:odd", "dataset.image_size=8"],
    "custom, keeps tensors": [*CUSTOM[:-2], "model.target=custom_models:keeps_tensors"],
    "skips": [*SKIPS, "freeze=[norm]", THREE, REPLICAS, BF16],
    "language model": [*LM, THREE],
    "language model, tied": [*LM, TIED, APART, REPLICAS],
    "translation": [*NMT, THREE, BF16],
    "translation, shared": [*NMT, *SHARED, APART],
    "translation, shared, tied": [*NMT, *SHARED, TIED, REPLICAS, BF16],
    "hf llama": [*TEXT, "model.lora={rank: 2, alpha: 4, target_modules: [q_proj, v_proj]}", BF16],
    "hf tied llama": [*TEXT, REPLICAS],
    "hf bert": TEXT,
    "hf vit": [*IMAGES, THREE],
    "hf t5": PAIRS,
    "hf tied gpt2": TEXT,
} | dict.fromkeys(ALIKE, TEXT)
# which are recomputed in all ways; the others with everything recomputed, and with nothing
IN_ALL_WAYS = "custom", "language model, tied"
# timm's own arguments, which make two of its models small
TINY = {
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32)},
    "vit_tiny_patch16_224": {"depth": 2, "embed_dim": 24, "num_heads": 2},
}


@pytest.fixture(autouse=True)
def _with_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where custom_models.py is
    monkeypatch.setattr(check_run, "run_task", run_here)
    Path("pairs").mkdir()
    for split in ("train", "test"):
        Path(f"pairs/{split}.tsv").write_text(
            "aba ba\tba\tde-en\nab\tab ba\tde-en\nb\ta\tde-en\nba ba ab\tab\tde-en\n" * 2
        )


def run_here(task: Task, spec: PipelineSpec, timeout_seconds: float, on_message: OnMessage) -> Failure | None:
    """Like `run_task`; a task of one process runs in this one."""
    if spec.layout.processes > 1:
        return run_task(task, spec, timeout_seconds, on_message)
    task(WorkerProcess(0, lambda: (ControlGroup(0, 1), None), on_message))
    return None


def check(*settings: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `gpipe check`, and its report."""
    code = command("check", *SMALL, *settings)
    (file,) = Path("outputs").glob("*_check_*/check.json")
    return code, json.loads(file.read_text())


def settings_of(model: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if model.startswith("hf "):
        from models.test_hugging_face import MODELS  # skips the test without transformers

        folder = Path("hf").absolute()  # profiles are cached by settings
        MODELS[model[3:]][1].save_pretrained(folder)
        return ["model=hf", f"model.name={folder}", "model.length=12", *RUNS[model]]
    if "model=timm" in RUNS[model]:
        makers = importlib.import_module("timm.models")._registry._model_entrypoints
        for name, small in TINY.items():
            monkeypatch.setitem(makers, name, partial(makers[name], **small))
    return RUNS[model]


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.slow if model in ALIKE else ()) for model in RUNS]
)
def test_the_engine_is_right(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(model, monkeypatch)
    if model not in IN_ALL_WAYS:
        monkeypatch.setattr(self_check, "MODES", ("never", "always"))
    code, found = check(*settings)
    shown = capsys.readouterr().out
    assert (code, found["identical"]) == (0, True), shown
    cuts, whole = {*range(1, found["config"]["partitions"] + 1)}, found["config"]["micro_batches"]
    wanted = {"in_process": cuts, "pytorch": {1}}
    wanted |= {"distributed": cuts - {1}} if APART in settings else {}
    wanted |= {"replicas": cuts} if REPLICAS in settings else {}
    assert wanted == {way: {row["partitions"] for row in found["rows"] if row["executor"] == way} for way in wanted}
    for row in found["rows"]:
        verdicts = {"identical"}
        if row["executor"] in ("pytorch", "replicas") or row["micro_batches"] != whole:
            verdicts.add("within tolerance")
        if row["micro_batches"] != whole:
            verdicts.add("differs, as it must")
        if (row["partitions"], row["recompute"], row["executor"]) == (1, "never", "in_process"):
            verdicts |= {"reference", "within tolerance"}
        assert row["verdict"] in verdicts, shown


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engine_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_with_fault(task: Task, *more: Any) -> Failure | None:
        return run_here(partial(with_fault, fault, task), *more)

    monkeypatch.setattr(check_run, "run_task", run_with_fault)
    settings = [*LM, TIED] if "tied" in fault else [*CUSTOM, REPLICAS] if "bucket" in fault else CUSTOM
    code, found = check(*settings)
    first = next((row["text"] for row in found["rows"] if row["verdict"] in ("differs", "fails")), "")
    assert (code, found["identical"]) == (1, False)
    assert FAULTS[fault][3] in f"{found['verdict']}; {first}"


def test_a_check_begins_with_the_weights_of_a_run(tmp_path: Path) -> None:
    train_here(configure(*SMALL, *CUSTOM, "max_steps=1"), tmp_path / "run")
    code, found = check(*CUSTOM, f"init_from={tmp_path / 'run'}")
    assert (code, found["identical"]) == (0, True)
    shutil.rmtree("outputs")
    assert found["loss"] != check(*CUSTOM)[1]["loss"]
