"""The plans of the site's presets: as `gpipe plan` makes them, from the data sheets of devices."""

from dataclasses import asdict, replace

from gpipe_cli.commands.recipe_run import simulating_recipe
from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.reporting.site.site import SitePreset
from gpipe_cli.reproduction.presets import Preset
from gpipe_cli.reproduction.simulated import Simulated
from gpipe_cli.units import duration, percent, plural, size

_LIMIT = "hardware.memory_gib"


def planned(preset: Preset) -> SitePreset:
    """The preset with its plan. One that does not fit its device by our count is planned without a limit, and says so.
    Raises InputError if it cannot be planned."""
    simulate, note = simulating_recipe(preset.recipe), ""
    try:
        found = simulate(preset.settings)
    except NothingFitsError as error:
        preset = replace(preset, settings=(*preset.settings, f"{_LIMIT}=null"))
        found = simulate(preset.settings)
        need = size(max(found.plan.device_bytes))
        limit = str(error).partition(":")[0].partition("=")[2]
        note = (
            f"By our count this takes {need} on the fullest device, more than the {limit} GiB in which the paper "
            "reports that it was trained, without saying in which precision or with how many micro-batches. This plan "
            "assumes that there is enough memory."
        )
    data = simulation_data(found.config, found.profile, found.plan)
    goals = {name: value for name, value in asdict(preset.challenge).items() if value is not None}
    explored = {**data, "answer": goals.pop("answer"), "challenge": goals}
    return SitePreset(preset.name, preset.group, preset.title, note, _facts(found), preset.command, explored)


def _facts(found: Simulated) -> str:
    """`K = 8, M = 16 of 4 samples: 5.01 s per step, idle 28.0 %; memory: 47.9 GiB on the fullest device, ...`."""
    plan, shares = found.plan, found.plan.breakdown
    idle = shares.bubble + shares.imbalance + shares.transfer + shares.set_up
    fullest, in_all, devices = max(plan.device_bytes), sum(plan.device_bytes), len(plan.device_bytes)
    memory = size(fullest) + ("" if devices == 1 else f" on the fullest device, {size(in_all)} across all {devices}")
    pieces = f"M = {plural(plan.micro_batches, 'micro-batch')} of {plural(plan.samples, 'sample')}"
    return f"K = {devices}, {pieces}: {duration(plan.step_seconds)} per step, idle {percent(idle)}; memory {memory}"
