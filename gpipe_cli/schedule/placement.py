"""Which device has which stages: the placement of K stages on P devices, as data.

``neighbours`` gives each device consecutive stages, as the paper does (section 2.2). With ``looped`` micro-batches pass
through all devices several times (Megatron-LM, Narayanan et al. 2021, section 2.2). With ``v`` they go to the last
device and return, so that the first device also has the last stage (Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory"). Eight stages on four devices:

    neighbours   0 1 | 2 3 | 4 5 | 6 7
    looped       0 4 | 1 5 | 2 6 | 3 7
    v            0 7 | 1 6 | 2 5 | 3 4
"""

from collections.abc import Sequence
from typing import Literal, get_args

PlacementName = Literal["neighbours", "looped", "v"]
PLACEMENTS: tuple[PlacementName, ...] = get_args(PlacementName)


def place(name: PlacementName, stages: int, devices: int) -> tuple[int, ...]:
    """The device of each stage. No device is without a stage if there are at least as many stages as devices.

    `v` turns round after every `devices` stages. With fewer than 2 `devices` stages, the last have a single stage.
    """
    match name:
        case "neighbours":
            return tuple(stage * devices // stages for stage in range(stages))
        case "looped":
            return tuple(stage % devices for stage in range(stages))
        case "v":
            if stages < 2 * devices:
                return tuple(min(stage, stages - 1 - stage) if stage >= devices else stage for stage in range(stages))
            turns = (divmod(stage, devices) for stage in range(stages))
            return tuple(devices - 1 - position if turn % 2 else position for turn, position in turns)


def placement_name(device_of_stage: Sequence[int]) -> PlacementName | None:
    """The name of a placement; None if it has none. Where several names give the same, as with a stage on each device,
    the first of `PLACEMENTS`."""
    stages, devices = len(device_of_stage), 1 + max(device_of_stage)
    return next((name for name in PLACEMENTS if place(name, stages, devices) == tuple(device_of_stage)), None)


def stages_of_devices(device_of_stage: Sequence[int]) -> list[list[int]]:
    """The stages of each device, which are numbered from 0 on."""
    stages: list[list[int]] = [[] for _ in range(1 + max(device_of_stage))]
    for stage, device in enumerate(device_of_stage):
        stages[device].append(stage)
    return stages
