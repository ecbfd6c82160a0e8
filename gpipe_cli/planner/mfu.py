"""The peak FLOP/s of the devices of a run, of which the MFU is a share."""

from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.planner.data_sheet import sheet_of_devices, with_data_sheet
from gpipe_cli.planner.pipeline_spec import PipelineSpec


def peak_flops(config: TrainConfig, spec: PipelineSpec) -> tuple[float | None, str]:
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
    if peak is None:
        return None, f"the peak of this {'CPU' if on_cpu else 'GPU'} is not known; give hardware.peak_tflops=..."
    of_sheet = f"{data_sheet.name} in {'float32' if key == 'peak_tflops' else config.precision}"
    source = of_sheet if (key, peak) == load_hardware(data_sheet.name).peak(config.precision) else f"hardware.{key}"
    # under torchrun each machine numbers its GPUs from 0
    devices = layout.processes_per_pipeline if layout.distributed and not on_cpu else len(set(layout.devices))
    devices *= layout.replicas
    each = f"{peak:.4g} TFLOP/s"
    return peak * 1e12 * devices, f"{each} ({source})" if devices == 1 else f"{devices} x {each} ({source})"
