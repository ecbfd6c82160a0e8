"""The operations that a model needs in a step, and those that its devices could do: what the MFU is a share of."""

from dataclasses import dataclass

from gpipe_cli.config.groups import HardwareConfig
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.placement import Placement
from gpipe_cli.planner.step_schedule import mini_batch_samples


@dataclass(frozen=True)
class StepFlops:
    """The operations that the model itself needs in a step, as the plan counts them, and what the devices could do."""

    step: float  # forward and backward of every layer, recomputation not counted, of a full mini-batch
    samples: int  # of that mini-batch
    tokens: int | None  # of that mini-batch, all as long as the longest; None for images
    peak_per_second: float | None  # of all devices that are used, by their data sheet; None: not known
    peak_source: str  # where the peak comes from, or why it is not known

    def per_second(self, samples_per_second: float | None, tokens_per_second: float | None) -> float | None:
        """Of real samples, or for text of real tokens: padding is no work. None without a speed."""
        rate, planned = (samples_per_second, self.samples) if self.tokens is None else (tokens_per_second, self.tokens)
        return None if rate is None else self.step / planned * rate


def step_flops(config: TrainConfig, profile: ModelProfile, placement: Placement) -> StepFlops:
    """What the model needs of a full mini-batch, and what the devices that it runs on could do."""
    samples = mini_batch_samples(config, profile.lengths)
    peak, source = _peak(config.hardware, placement)
    return StepFlops(
        step=sum(cost.flops for cost in profile.costs) * samples,
        samples=samples,
        tokens=samples * max(profile.lengths) if config.task != "classification" else None,
        peak_per_second=peak,
        peak_source=source,
    )


def _peak(hardware: HardwareConfig, placement: Placement) -> tuple[float | None, str]:
    """Operations a second of all devices in use, and where the figure comes from; or None, and why it is not known.

    The peak of a machine that the settings name but that is not here says nothing of what ran here.
    """
    device = placement.devices[0]
    here = resolved(load_hardware("auto"), device).name  # auto: a GPU without a file
    sheet = resolved(hardware, device)
    if hardware.name not in ("auto", here) and (here != "auto" or device == "cpu"):
        return None, f"hardware={hardware.name} is not what it ran on, so its peak says nothing; leave it out"
    if sheet.peak_tflops is None:
        what = "this CPU" if device == "cpu" else "this GPU"
        return None, f"the peak of {what} is not known; hardware.peak_tflops=... says it"
    # under torchrun machines count their GPUs from 0, each
    distributed = placement.distributed and device != "cpu"
    devices = placement.processes if distributed else len(set(placement.devices))
    each = f"{sheet.peak_tflops:g} TFLOP/s"
    given = sheet.peak_tflops != load_hardware(sheet.name).peak_tflops
    name = "hardware.peak_tflops" if given else sheet.name
    return sheet.peak_tflops * 1e12 * devices, f"{each} ({name})" if devices == 1 else f"{devices} x {each} ({name})"
