"""Settings that the machine decides unless the user has. They decide bits of results: a resumed run keeps them."""

from dataclasses import replace

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.planner.data_sheet import computes_on_gpu
from gpipe_cli.planner.plan import Plan


def with_memory_format(config: TrainConfig) -> TrainConfig:
    """The settings with `contiguous` for images in float32 on the GPUs of this machine: cuDNN's kernels for channels
    last are made for tensor cores, which do not multiply float32."""
    undecided = config.memory_format == "auto" and config.precision == "float32" and not config.text
    on_gpu = config.hardware.is_this_machine and computes_on_gpu(config)
    return replace(config, memory_format="contiguous") if undecided and on_gpu else config


def with_threads(plan: Plan) -> Plan:
    """The plan with the number of threads of its layout, on which the order of sums depends, among its settings."""
    return replace(plan, config=replace(plan.config, threads=plan.layout.threads))
