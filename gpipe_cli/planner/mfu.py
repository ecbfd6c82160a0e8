"""The FLOPs that a model needs for a step, and its devices' peak FLOP/s: the two sides of the MFU."""

from dataclasses import dataclass

from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.planner.data_sheet import sheet_of_devices, with_data_sheet
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.planner.step_schedule import mini_batch_samples


@dataclass(frozen=True)
class StepFlops:
    """FLOPs that the model itself needs for a step, as counted by the plan, and the peak of the devices."""

    step: float  # FLOPs of all forwards and backwards of a full mini-batch, without recomputation
    samples: int  # samples of that mini-batch
    tokens: int | None  # tokens of that mini-batch, all sentences as long as the longest; None for images
    peak_per_second: float | None  # peak FLOP/s of all devices in use together; None if it is not known
    peak_source: str  # the source of the peak, or why it is not known

    def per_second(self, samples_per_second: float | None, tokens_per_second: float | None) -> float | None:
        """Achieved FLOP/s at a speed in samples or, for text, in tokens without padding; None if that speed is None."""
        rate, planned = (samples_per_second, self.samples) if self.tokens is None else (tokens_per_second, self.tokens)
        return None if rate is None else self.step / planned * rate


def step_flops(config: TrainConfig, profile: ModelProfile, spec: PipelineSpec) -> StepFlops:
    """The FLOPs of a full mini-batch and the peak of the devices in use."""
    samples = mini_batch_samples(config, profile.lengths)
    peak, source = _peak(config, spec)
    return StepFlops(
        step=sum(cost.flops for cost in profile.costs) * samples,
        samples=samples,
        tokens=samples * max(profile.lengths) if config.text else None,
        peak_per_second=peak,
        peak_source=source,
    )


def _peak(config: TrainConfig, spec: PipelineSpec) -> tuple[float | None, str]:
    """The peak FLOP/s of all devices in use and the source of this figure; or None and why it is not known.

    If the settings name a machine other than this, its peak does not apply to what ran here.
    """
    hardware, layout = config.hardware, spec.layout
    on_cpu = layout.on_cpu
    local_data_sheet = sheet_of_devices(layout.devices).name  # auto: a GPU without a file
    data_sheet = with_data_sheet(hardware, layout.devices)
    if hardware.name not in ("auto", local_data_sheet) and (local_data_sheet != "auto" or on_cpu):
        return None, f"hardware={hardware.name} is not what it ran on, so its peak does not apply; remove it"
    key, peak = data_sheet.peak(config.precision)
    if peak is not None:
        of_sheet = f"{data_sheet.name} in {'float32' if key == 'peak_tflops' else config.precision}"
        source = of_sheet if (key, peak) == load_hardware(data_sheet.name).peak(config.precision) else f"hardware.{key}"
    else:
        return None, f"the peak of this {'CPU' if on_cpu else 'GPU'} is not known; give hardware.peak_tflops=..."
    # under torchrun each machine numbers its GPUs from 0
    devices = layout.processes_per_pipeline if layout.distributed and not on_cpu else len(set(layout.devices))
    devices *= layout.replicas
    each = f"{peak:.4g} TFLOP/s"
    return peak * 1e12 * devices, f"{each} ({source})" if devices == 1 else f"{devices} x {each} ({source})"
