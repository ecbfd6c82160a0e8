"""Measures that no process ever holds a whole model of Hugging Face's: the peak memory of each worker beyond that of a
worker with a tiny model, once its layers are loaded from several files, and after a training step; and how long a plan
takes.

The optimizer keeps no state and activations are small: a step needs weights, gradients and, of the first and the last
layer, which have the vocabulary, the gradient of one micro-batch. Pages of the files that were read count as well.

Usage: python recipes/measurements/own_layers.py        needs transformers, 2 GB of disk and 4 GB of memory
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runs import command_line, config_of

from gpipe_cli.assembly.build import build_model
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.schedule.schedule import Action
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.system.process_memory import peak_memory_bytes
from gpipe_cli.training.engine import WorkerProcess
from gpipe_cli.training.train_loop import train

SETTINGS = [
    "model=hf", "model.length=8", "dataset=synthetic_text", "dataset.vocabulary=64", "dataset.train_samples=4",
    "dataset.test_samples=4", "batch_size=4", "micro_batches=4", "epochs=1", "optimizer=sgd", "optimizer.momentum=0",
    "ema_decay=0", "gradient_clipping=0", "threads=1", "device=cpu", "hardware=cpu", "logger=[]",
    "checkpoint.every_epochs=0",
]  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """Bytes of each of 4 workers: parameters, and peak memory once they are loaded and after a step."""

    own: list[int]
    loaded: list[int]
    trained: list[int]


def train_watched(config: TrainConfig, spec: PipelineSpec, folder: Path, process: WorkerProcess) -> None:
    """Train; write the peaks of this process before its first action and at the end to a file of its own."""
    peaks: list[int] = []

    def watch(action: Action, samples: int, lengths: Sequence[int]) -> None:
        if not peaks:
            peaks.append(peak_memory_bytes(torch.device("cpu")))
        process.on_action(action, samples, lengths)

    train(config, "", spec, folder, replace(process, on_action=watch))
    peaks.append(peak_memory_bytes(torch.device("cpu")))
    (folder / f"{process.number}.json").write_text(json.dumps(peaks))


def llama(width: int, blocks: int, vocabulary: int) -> Any:
    """A configuration like those of Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=blocks,
        num_attention_heads=max(1, width // 64), tie_word_embeddings=False,
    )  # fmt: skip


def peaks_of(described: Any, folder: Path) -> Peaks:
    """Write a model's files, and train it for a step."""
    from own_layers import train_watched  # not of __main__, which workers cannot import
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(described)
    model.save_pretrained(folder, max_shard_size=max(4096, 4 * model.num_parameters() // 8))
    del model
    settings = [f"model.name={folder}", "model.pretrained=true", "partitions=4", "executor=distributed"]
    config = config_of([*SETTINGS, *settings])
    fork_server.start(config)
    spec, layers = make_pipeline_spec(config), dict(build_model(config).named_children())
    failure = run_task(partial(train_watched, config, spec, folder), spec, 60.0, lambda message: None)
    if failure is not None:
        raise SystemExit(failure.text)
    own = [sum(one.nbytes for name in names for one in layers[name].parameters()) for names in spec.layer_names]
    peaks = [json.loads((folder / f"{process}.json").read_text()) for process in range(4)]
    return Peaks(own, *(list(column) for column in zip(*peaks, strict=True)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--planned-width", type=int, default=2560)
    parser.add_argument("--planned-blocks", type=int, default=24)
    options = parser.parse_args(arguments)
    from transformers import LlamaForCausalLM, logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = peaks_of(llama(64, 4, 64), folder / "tiny")
        large = peaks_of(llama(options.width, options.blocks, options.vocabulary), folder / "large")
        files = len([*(folder / "large").glob("*.safetensors")])
        planned = llama(options.planned_width, options.planned_blocks, options.vocabulary)
        planned.save_pretrained(folder / "planned")
        began = time.monotonic()
        command = ["plan", *SETTINGS, f"model.name={folder / 'planned'}", "partitions=8", f"output={folder}"]
        subprocess.run([sys.executable, "-m", "gpipe_cli", *command], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began
    with torch.device("meta"):
        parameters = LlamaForCausalLM(planned).num_parameters()
    whole, rows, most = sum(large.own), [], 0.0
    for stage, own in enumerate(large.own):
        beyond = large.loaded[stage] - tiny.loaded[stage], large.trained[stage] - tiny.trained[stage]
        most = max(most, beyond[0] / whole)
        rows.append((str(stage), *(f"{one / 1e6:.0f} ({one / whole:.0%})" for one in (own, *beyond))))
    columns = ("stage", "own weights, MB", "peak when loaded, MB", "peak after a step, MB")
    title = f"Of {whole / 1e6:.0f} MB in {files} files, beyond a tiny model's"
    print(to_markdown(Table.of_rows(title, map(Column, columns), rows)))
    print(f"gpipe plan of {parameters / 1e9:.2f} billion parameters, partitions=8: {seconds:.1f} s")
    return int(whole > 1e8 and most > 2 / 3)  # in small models other memory is larger


if __name__ == "__main__":
    sys.exit(main())
