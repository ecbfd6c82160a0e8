"""The JavaScript that the page simulates with, in a real browser, against the Python that runs and plans."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import NEEDED, opened_page
from plan_runs import EVEN, HOURGLASS, plan_of, traced
from training_runs import configure

from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory
from gpipe_cli.pipeline.schedule.breakdown import breakdown
from gpipe_cli.pipeline.schedule.dependencies import ScheduleError, check
from gpipe_cli.pipeline.schedule.held import Held, bytes_held, peak_waiting
from gpipe_cli.pipeline.schedule.named_schedules import ORDERS, SCHEDULES, order
from gpipe_cli.pipeline.schedule.placement import PLACEMENTS, place
from gpipe_cli.pipeline.schedule.schedule import RECOMPUTE, Schedule, with_recomputation
from gpipe_cli.pipeline.schedule.schedule_file import csv_of, read_schedule
from gpipe_cli.pipeline.schedule.simulator import EdgeCost, SkipCost, StageCost, TieCost, ideal_bubble, simulate
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.device_rates import rates_of_sheet
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.plan import Plan, TooLargeError, make_plan
from gpipe_cli.planner.shared_layers import Shared
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.reporting.page.page import write_page
from gpipe_cli.units import size

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = NEEDED
SETTINGS = (*EVEN, "hardware=v100", "batch_size=22", "partitions=2")
TEXT = (
    "model=transformer_lm", "dataset=synthetic_text", "model.layers=3", "model.width=16", "model.heads=2",
    "model.length=8", "device=cpu", "hardware=v100", "~presets",
)  # fmt: skip
SPLIT = (*SETTINGS, "schedule=zero_bubble")  # so that both halves of backwards are traced


@cache
def planned(*settings: str) -> tuple[dict[str, Any], Plan]:
    """A plan by figures, and what the page gets of it. The model is traced once."""
    config, profile = configure(*SPLIT, *settings), traced(*SPLIT)
    plan = plan_of(config, profile)
    return simulation_data(config, profile, plan), plan


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Page]":
    path = tmp_path_factory.mktemp("page") / "pipeline.html"
    write_page(path, "AmoebaNet-D on digits", planned()[0], ())
    for page in opened_page():
        page.goto(f"file://{path}")
        yield page


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Nested lists and mappings alike, fractions to 1e-9 of each other."""
    if isinstance(expected, float):
        assert abs(found - expected) <= 1e-9 * abs(expected) + 1e-15, (where, found, expected)
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}/{n}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}/{key}")
    else:
        assert found == expected, where


# --- schedules and their simulation

ENGINE = """cases => cases.map(({name, K, M, devices, recompute, costs, seconds, sizes, skips}) => {
  const rows = gpipe.withRecomputation(gpipe.order(name, K, M, devices), recompute);
  const timeline = gpipe.simulate(rows, costs);
  const idle = {};
  gpipe.idleRegions(timeline, M, seconds).flatMap(([, idle]) => idle).forEach(({start, end, why}) => {
    idle[why] = (idle[why] || 0) + (end - start);
  });
  const chain = gpipe.critical(timeline, rows);
  return {
    rows: rows.map(row => row.map(gpipe.key)),
    spans: timeline.spans.map(of => of.map(({action, start, end}) => [gpipe.key(action), start, end])),
    events: timeline.events.map(of => of.map(({what, start, end, action}) =>
      [what, start, end, action && gpipe.key(action)])),
    shares: gpipe.breakdown(timeline, M, seconds),
    held: gpipe.stagesOf(rows).map((of, k) => gpipe.memory(of, sizes[k])),
    waiting: gpipe.peakWaiting(rows, skips, costs.device_of_stage),
    checked: gpipe.check(rows), csv: gpipe.csv(rows), ofDevices: gpipe.csv(rows, timeline.device_of_stage), idle,
    chain: chain.map(({start, end}) => [start, end]),
  };
})"""


def costs_of(
    stages: Sequence[StageCost],
    edges: Sequence[EdgeCost],
    slowdown: Sequence[float],
    device_of_stage: Sequence[int],
    ties: Sequence[TieCost] = (),
    skips: Sequence[SkipCost] = (),
) -> dict[str, Any]:
    """As the page's simulator takes them."""

    def sent(edge: EdgeCost) -> dict[str, float]:
        return {"forward": edge.forward_seconds, "backward": edge.backward_seconds}

    keys = ("forward", "graph", "backward", "inputs", "weights", "update", "sum")
    return {
        "stages": [dict(zip(keys, astuple(stage), strict=True)) for stage in stages],
        "edges": list(map(sent, edges)),
        "slowdown": slowdown,
        "device_of_stage": device_of_stage,
        "ties": list(map(asdict, ties)),
        "skips": [{"sender": skip.sender, "receiver": skip.receiver, **sent(skip.edge)} for skip in skips],
    }


def random_case(chance: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """What JavaScript is asked, and what Python says."""
    name, devices = chance.choice(SCHEDULES), chance.randint(1, 4)
    K = devices * chance.randint(1, 8 // devices) if name == "interleaved" else chance.randint(1, 8)
    devices = -(-K // 2) if ORDERS[name].placement == "v" else devices
    M = chance.randint(1, 32)
    sets = [chance.sample(range(M), chance.randint(0, M)) for _ in range(K)]
    recompute: Any = chance.choice([*RECOMPUTE, sets])
    stages = [
        StageCost(*(chance.uniform(0.1, 2) for _ in range(5)), chance.choice((0.0, 0.3)), chance.choice((0.0, 0.5)))
        for _ in range(K)
    ]
    edges = [EdgeCost(chance.uniform(0, 1), chance.uniform(0, 1)) for _ in range(K - 1)] * chance.randint(0, 1)
    slowdown = [1.0, *(chance.uniform(1, 3) for _ in range(chance.randint(1, 4)))] * chance.randint(0, 1)
    placement = ORDERS[name].placement
    of_rows = list(place(placement, K, devices)) if placement else list(range(K))
    device_of_stage = chance.choice([of_rows, [row // 2 for row in of_rows]])
    if placement is None and chance.random() < 0.5:
        device_of_stage = list(place(chance.choice(PLACEMENTS), K, chance.randint(1, K)))
    ties = [
        TieCost(tuple(sorted(chance.sample(range(K), chance.randint(1, K)))), chance.uniform(0, 3))
        for _ in range(chance.randint(0, 2))
    ]
    apart = [(sender, receiver) for sender in range(K) for receiver in range(sender + 2, K)]
    skips = [
        SkipCost(*ends, EdgeCost(chance.uniform(0, 5), chance.uniform(0, 5)))
        for ends in chance.sample(apart, chance.randint(0, min(4, len(apart))))
    ]
    waiting = {
        (skip.sender, skip.receiver): [(chance.randint(0, 1 << 40), chance.randint(0, 1 << 40)) for _ in range(M)]
        for skip in skips
    }
    sizes = [[Held(*(chance.randint(0, 1 << 40) for _ in range(4))) for _ in range(M)] for _ in range(K)]

    mode = recompute if isinstance(recompute, str) else tuple(map(frozenset, recompute))
    schedule = with_recomputation(order(name, K, M, devices), mode)
    check(schedule)
    timeline = simulate(schedule, stages, edges, slowdown, device_of_stage, ties, skips)
    seconds = max([timeline.end_seconds, *(e.end_seconds for of in timeline.events for e in of)]) * 1.1
    shares = breakdown(timeline, M, seconds)
    asked = {
        "name": name, "K": K, "M": M, "devices": devices, "recompute": recompute, "seconds": seconds,
        "costs": costs_of(stages, edges, slowdown, device_of_stage, ties, skips),
        "sizes": [[one._asdict() for one in of] for of in sizes],
        "skips": [{"sender": one, "receiver": other, "sizes": of} for (one, other), of in waiting.items()],
    }  # fmt: skip
    whole = seconds * len(set(device_of_stage))
    idle = {why: getattr(shares, why) * whole for why in ("bubble", "imbalance", "transfer", "set_up")}
    expected = {
        "rows": [list(map(str, row)) for row in schedule],
        "spans": [[[str(s.action), s.start_seconds, s.end_seconds] for s in of] for of in timeline.stages],
        "events": [
            [[e.what.value, e.start_seconds, e.end_seconds, e.action and str(e.action)] for e in of]
            for of in timeline.events
        ],
        "shares": dict(zip(shares.__dataclass_fields__, astuple(shares), strict=True)),
        "held": [list(bytes_held(of, size)) for of, size in zip(schedule.stages, sizes, strict=True)],
        "waiting": list(peak_waiting(schedule, waiting, device_of_stage)),
        "checked": None, "csv": csv_of(schedule), "ofDevices": csv_of(schedule, device_of_stage),
        "idle": {why: value for why, value in idle.items() if value > 1e-9},
    }  # fmt: skip
    return asked, expected


def test_simulations_are_those_of_python(page: "Page", tmp_path: Path) -> None:
    """Every action's times, every event, every share, all bytes held; idle regions add up to their shares, and the
    critical path is one chain from the beginning to the last action."""
    cases = [random_case(random.Random(seed)) for seed in range(24)]
    for (asked, expected), found in zip(cases, page.evaluate(ENGINE, [asked for asked, _ in cases]), strict=True):
        chain = found.pop("chain")
        assert chain[0][0] == pytest.approx(0, abs=1e-9)
        assert [before[1] for before in chain[:-1]] == pytest.approx([after[0] for after in chain[1:]], abs=1e-9)
        found["idle"] = {why: value for why, value in found["idle"].items() if value > 1e-9}
        assert_close(found, expected, asked["name"])
        file = tmp_path / "drawn.csv"
        file.write_text(found["csv"], encoding="utf-8")
        read_schedule.cache_clear()
        assert [list(map(str, row)) for row in read_schedule(str(file), asked["K"], asked["M"])] == expected["rows"]


def test_orders_on_a_v_are_those_of_python(page: "Page") -> None:
    names = [name for name in SCHEDULES if ORDERS[name].placement == "v"]
    asked = [*product(names, range(1, 17), (1, 2, 3, 7, 8, 40)), ("zbv", 64, 100)]
    found = page.evaluate("all => all.map(one => gpipe.order(...one).map(row => row.map(gpipe.key).join()))", asked)
    for one, rows in zip(asked, found, strict=True):
        assert rows == [",".join(map(str, row)) for row in order(*one)], one


def test_a_schedule_is_refused_as_python_refuses_it(page: "Page") -> None:
    """What an edit may lead to: actions that change places, are missing or double."""
    chance, schedules = random.Random(0), []
    for _ in range(300):
        K, M = chance.randint(1, 4), chance.randint(1, 4)
        name = chance.choice(("gpipe", "1f1b", "zero_bubble"))
        rows = [list(row) for row in with_recomputation(order(name, K, M), chance.choice(RECOMPUTE))]
        for _ in range(chance.randint(0, 3)):
            row, other, at = chance.choice(rows), chance.choice(rows), chance.randint(1, 9)
            match chance.choice((*["neighbours"] * 8, "move", "lose", "double", "row")):
                case "neighbours" if at < len(row) and row[at].micro_batch != row[at - 1].micro_batch:
                    row[at - 1 : at + 1] = row[at], row[at - 1]
                case "move":
                    row.insert(chance.randrange(len(row)), row.pop(chance.randrange(len(row))))
                case "lose" if len(row) > 1:
                    row.pop(chance.randrange(len(row)))
                case "double":
                    row.insert(chance.randrange(len(row)), chance.choice(row))
                case "row" if len(row) > 1:
                    other.append(row.pop(chance.randrange(len(row))))
        schedules.append(Schedule(map(tuple, rows)))
    asked = [[list(map(str, row)) for row in schedule] for schedule in schedules]
    found = page.evaluate("all => all.map(rows => gpipe.check(rows.map(row => row.map(gpipe.action))))", asked)
    refused = 0
    for schedule, verdict in zip(schedules, found, strict=True):
        expected = None
        try:
            check(schedule)
        except ScheduleError as error:
            expected = error.what
        assert (verdict and verdict["what"]) == expected
        refused += expected is not None
    assert 100 < refused < 250
    assert any(verdict and "deadlock" in verdict["what"] and verdict["waits"] for verdict in found)


def test_stages_are_on_the_devices_of_python(page: "Page") -> None:
    asked = [(name, K, each) for name in PLACEMENTS for K in range(1, 13) for each in range(1, K + 1)]
    for (name, K, each), found in zip(
        asked, page.evaluate("all => all.map(one => gpipe.placed(...one))", asked), strict=True
    ):
        rows = layout_of(configure(*EVEN, f"partitions={K}", f"stages_per_process={each}", f"placement={name}"))
        assert tuple(found) == rows.row_of_stage, (name, K, each)


# --- what settings lead to

TOO_LARGE = ("partitions=6", "micro_batches=2", "schedule=interleaved", "stages_per_process=2", "recompute=except_last")
OTHERS = (
    ("partitions=2",),
    ("partitions=1", "micro_batches=1"),
    ("partitions=4", "micro_batches=8", "schedule=1f1b", "recompute=never"),
    ("partitions=5", "micro_batches=7", "schedule=gpipe", "recompute=always"),
    ("partitions=3", "micro_batches=16", "schedule=zero_bubble", "recompute=never"),
    TOO_LARGE,
    ("partitions=6", "micro_batches=11", "schedule=gpipe", "stages_per_process=3"),
    ("partitions=6", "micro_batches=11", "schedule=1f1b", "stages_per_process=2", "placement=v"),
    ("partitions=5", "micro_batches=10", "schedule=zero_bubble", "stages_per_process=2", "placement=looped"),
    ("partitions=6", "micro_batches=9", "schedule=zbv"),
    ("partitions=5", "micro_batches=11", "schedule=v_min", "recompute=never"),
)
LIMITED = ("hardware.memory_gib=0.005", "recompute=auto")


def controls(settings: Sequence[str]) -> dict[str, Any]:
    """Those of the page, at the defaults of the plan that it begins with."""
    given = dict(setting.split("=") for setting in settings if "." not in setting)
    own = {"partitions": 2, "micro_batches": 4, "schedule": "zero_bubble", "recompute": "except_last",
           "stages_per_process": 1, "placement": "neighbours"}  # fmt: skip
    return {key: type(value)(given.get(key, value)) for key, value in own.items()}


TIED = (
    "model=transformer_lm", "~presets", "dataset=synthetic_text", "dataset.vocabulary=400", "model.length=16",
    "model.layers=6", "model.width=16", "model.hidden=32", "model.heads=2", "model.tie_embeddings=true",
    "batch_size=24", "device=cpu", "hardware=v100", "ema_decay=0.9",
)  # fmt: skip


SKIPPING = (*HOURGLASS, *SPLIT[len(EVEN) :])


def test_skips_are_as_in_a_plan(page: "Page") -> None:
    """From the plan of two stages: cuts that count what skips cost to send, the wait for them and the bytes of those
    that wait, where they go past stages, to the next one, to another one of the same device, or nowhere."""
    config, profile = configure(*SKIPPING), traced(*SKIPPING)
    config = replace(config, hardware=replace(config.hardware, link_gb_per_second=0.02))  # so that links matter
    data = simulation_data(config, profile, plan_of(config, profile))
    others = [
        {"partitions": K, "micro_batches": M, "schedule": schedule, "stages_per_process": each, "recompute": recompute}
        for K, M, schedule, each, recompute in (
            (1, 2, "gpipe", 1, "never"), (2, 4, "1f1b", 1, "never"), (3, 5, "zero_bubble", 1, "never"),
            (4, 7, "gpipe", 1, "always"), (5, 8, "1f1b", 1, "except_last"), (6, 8, "gpipe", 2, "never"),
            (6, 9, "interleaved", 2, "except_last"), (9, 8, "zero_bubble", 1, "never"), (17, 3, "1f1b", 1, "always"),
        )
    ]  # fmt: skip
    found = page.evaluate("([data, all]) => all.map(controls => gpipe.configured(data, controls))", [data, others])
    long, waiting, moved = 0, 0, 0
    for other, one in zip(others, found, strict=True):
        asked = replace(config, **other)
        plan = plan_of(asked, profile)
        assert one.get("problem") is None
        assert one["balance"] == list(plan.balance), other
        assert_close(one["step_seconds"], plan.step_seconds, str(other))
        memory = [{**of, "held": max(of["held"])} for of in one["memory"]]
        assert memory == [
            {"weights": m.weights_bytes, "gradients": m.gradients_bytes, "optimizer": m.optimizer_bytes,
             "buffers": m.buffers_bytes, "workspace": m.workspace_bytes, "held": m.activations_bytes}
            for m in plan.memory
        ], other  # fmt: skip
        long += bool(one["skips"])
        waiting += any(m.buffers_bytes for m in plan.memory)
        alone = make_plan(asked, profile, replace(plan.costs, skips=()), plan.layout)
        moved += alone.balance != plan.balance
    assert (long, waiting) == (7, 7)  # of three stages and more
    assert moved > 1


def test_measured_seconds_of_skips_are_in_proportion_to_a_micro_batch() -> None:
    config, profile = configure(*SKIPPING), traced(*SKIPPING)
    costs = replace(predicted_costs(config, profile, layout_of(config)), rates=None)
    data = simulation_data(config, profile, make_plan(config, profile, costs, layout_of(config)))
    own, halved = (data["costs"]["of"][M]["skips"] for M in ("4", "2"))
    assert own == [[skip.forward, skip.backward] for skip in costs.skips]
    assert halved == [[2 * forward, 2 * backward] for forward, backward in own]


def test_tied_weights_are_as_in_a_plan(page: "Page") -> None:
    """From the plan of two stages: a weight that one stage has twice, or two stages once; the wait for its gradient."""
    config = configure(*TIED, "partitions=2")
    data = simulation_data(config, profile_model(config), plan_of(config, profile_model(config)))
    for partitions in (1, 2, 4):
        plan = plan_of(configure(*TIED, f"partitions={partitions}"), profile_model(config))
        found = page.evaluate(
            "([data, controls]) => gpipe.configured(data, controls)", [data, {"partitions": partitions}]
        )
        assert_close(found["step_seconds"], plan.step_seconds)
        fixed = [{key: of[key] for key in ("weights", "gradients", "optimizer", "buffers")} for of in found["memory"]]
        assert fixed == [
            {"weights": m.weights_bytes, "gradients": m.gradients_bytes, "optimizer": m.optimizer_bytes,
             "buffers": m.buffers_bytes} for m in plan.memory
        ]  # fmt: skip


@pytest.mark.parametrize("given", [(), LIMITED, ("replicas=2",)], ids=["plain", "limited", "replicas"])
def test_other_settings_lead_to_what_a_plan_of_them_says(page: "Page", given: tuple[str, ...]) -> None:
    """From the data of one plan: the cut, the order, the step, its shares, the memory of each stage and device."""
    data, _ = planned(*given)
    others = [one for one in OTHERS if "micro_batches=16" not in one or not given]  # more than a replica has samples
    if given == LIMITED:
        others = [(*one, "recompute=auto") for one in others if "micro_batches=1" not in one and one != TOO_LARGE]
    found = page.evaluate(
        """([data, all]) => all.map(controls => {
          const {problem, balance, rows, step_seconds, breakdown, memory, device_memory, samples_per_second} =
            gpipe.configured(data, controls);
          return {problem: problem || null, balance, rows: rows.map(row => row.map(gpipe.key)), step_seconds, breakdown,
            memory: memory.map(({held, ...rest}) => ({...rest, held: Math.max(...held)})), samples_per_second,
            devices: device_memory.map(of =>
              of.weights + of.gradients + of.optimizer + of.buffers + of.workspace + Math.max(...of.held))};
        })""",
        [data, [controls((*given, *other)) for other in others]],
    )
    for other, one in zip(others, found, strict=True):
        _, plan = planned(*given, *other)
        shares = plan.breakdown
        assert_close(one, {
            "problem": None,
            "balance": list(plan.balance),
            "rows": [list(map(str, row)) for row in plan.schedule],
            "step_seconds": plan.step_seconds,
            "breakdown": dict(zip(shares.__dataclass_fields__, astuple(shares), strict=True)),
            "memory": [{"weights": m.weights_bytes, "gradients": m.gradients_bytes, "optimizer": m.optimizer_bytes,
                        "buffers": m.buffers_bytes, "workspace": m.workspace_bytes,
                        "held": m.activations_bytes} for m in plan.memory],
            "samples_per_second": 22 / plan.step_seconds, "devices": list(plan.device_bytes),
        }, str(other))  # fmt: skip


def test_a_run_on_this_machine_is_simulated_as_it_was_planned(page: "Page") -> None:
    """Where processes share cores and slow each other down, or stages take turns in one process; on devices of their
    own they do not, and only those of a stage's process still take turns."""
    for settings in (("partitions=2",), ("partitions=3", "executor=in_process"), ("partitions=2", "replicas=2")):
        config, profile = configure(*EVEN, "schedule=1f1b", *settings), traced(*EVEN)
        sheet = rates_of_sheet(resolved(config.hardware, layout_of(config).devices), 1)
        costs = predicted_costs(config, profile, layout_of(config), replace(sheet, slowdown=1.3, together=2))
        plan = make_plan(config, profile, costs, layout_of(config))
        data = simulation_data(config, profile, plan)
        own = {"balance": data["balance"], "schedule": "1f1b"}  # whose order is made again
        found = page.evaluate(
            """([data, own]) => [{}, own, {...own, own_devices: true}].map(one =>
              gpipe.configured({...data}, one).step_seconds)""",
            [{**data, "setting": {**data["setting"], "schedule": "gpipe"}}, own],
        )
        assert found[1] == pytest.approx(plan.step_seconds, rel=1e-9)
        assert found[0] == pytest.approx(plan.step_seconds, rel=1e-9)
        alone = make_plan(config, profile, replace(costs, slowdown=()), layout_of(config))
        assert found[2] == pytest.approx(alone.step_seconds, rel=1e-9)
        assert (found[2] < 0.99 * found[1]) == (costs.slowdown[len(set(plan.device_of_stage)) - 1] > 1)


def test_the_bubble_becomes_that_of_its_formula_as_all_else_is_taken_away(page: "Page") -> None:
    """The page names what keeps it from (D-1)/(M+D-1) by what changes on the way there."""
    data, _ = planned()
    data = {**data, "slowdown": {"at_once": 2, "cores": 2, "factor": 1.3, "together": 2}}
    settings = [
        {"partitions": K, "micro_batches": M, "schedule": schedule, "recompute": recompute, "stages_per_process": each}
        for K, M, each in ((1, 4, 1), (2, 4, 1), (4, 2, 1), (5, 16, 1), (4, 8, 2), (6, 4, 3))
        for schedule, recompute in (("gpipe", "always"), ("gpipe", "never"), ("1f1b", "except_last"))
        if each == 1 or schedule == "gpipe"
    ]
    found = page.evaluate(
        """([data, all]) => all.map(controls => {
          const figure = gpipe.configured(data, controls);
          return [figure.breakdown.bubble, gpipe.bubbles(data, figure)];
        })""",
        [data, settings],
    )
    for controls, (shown, steps) in zip(settings, found, strict=True):
        devices = controls["partitions"] // controls["stages_per_process"]
        assert steps[0] == pytest.approx(shown, abs=1e-12)
        assert steps[-1] == pytest.approx(ideal_bubble(devices, controls["micro_batches"]), abs=1e-9), controls
        assert (steps[1] != steps[2]) == (devices > 1 and controls["recompute"] != "never" and steps[2] > 0), controls


def test_cuts_keep_within_the_memory(page: "Page") -> None:
    """Also where another cut would be faster; that no cut fits is said."""
    data, _ = planned()
    settings = [(*one, f"recompute={mode}") for one in OTHERS[2:] for mode in ("auto", "never")]
    asked, expected, moved = [], [], 0
    for given, quarters in product(settings, (6, 9, 12, 16)):  # of a MiB
        asked.append([{**data, "limit": {"bytes": quarters << 18, "of": "device"}}, controls(given)])
        try:
            _, plan = planned(*given, f"hardware.memory_gib={quarters / 4096}")
        except TooLargeError:
            expected.append(None)
        else:
            expected.append([list(plan.balance), plan.step_seconds])
            moved += plan.balance != planned(*given)[1].balance
    found = page.evaluate(
        """all => all.map(([data, controls]) => {
          const {balance, step_seconds, problem} = gpipe.configured(data, controls);
          return problem ? null : [balance, step_seconds];
        })""",
        asked,
    )
    assert_close(found, expected)
    assert expected.count(None) in range(10, len(expected) - 10)
    assert moved > 2


def test_of_auto_the_page_knows_the_order_of_the_plan_only(page: "Page") -> None:
    data, plan = planned("schedule=auto", "partitions=3")
    own, other = page.evaluate(
        """data => [{backward_factor: 2}, {partitions: 4}].map(controls => {
          const {rows, problem} = gpipe.configured(data, controls);
          return rows ? rows.map(row => row.map(gpipe.key)) : problem;
        })""",
        data,
    )
    assert own == [list(map(str, row)) for row in plan.schedule]
    assert "choose another schedule" in other


def test_cuts_keep_together_what_layers_share(page: "Page") -> None:
    config, profile = configure(*SPLIT), traced(*SPLIT)
    for (first, second), partitions in product(((0, 1), (1, 4), (2, 3), (3, 6)), (2, 4, 5)):
        other = replace(config, partitions=partitions)
        tied = replace(profile, shared=(Shared(first, second, "they share"),))
        costs = predicted_costs(config, tied, layout_of(config))
        data = simulation_data(config, tied, make_plan(config, tied, costs, layout_of(config)))
        found = page.evaluate("([data, K]) => gpipe.configured(data, {partitions: K})", [data, partitions])
        if len(profile.costs) - (second - first) < partitions:
            assert found["problem"] == "they share"
        else:
            assert found.get("problem") is None
            assert found["balance"] == list(plan_of(other, tied).balance)


def test_what_cannot_be_is_said(page: "Page") -> None:
    data, _ = planned(*LIMITED)
    interleaved = {"schedule": "interleaved", "stages_per_process": 2}
    settings = [
        {"partitions": 6, "micro_batches": 2, **interleaved}, {"partitions": 8}, {"micro_batches": 23},
        {"partitions": 5, **interleaved}, {"rows": [["0F0", "0B0"], ["1B0", "1F0"]]},
    ]  # fmt: skip
    ask = "([data, all]) => all.map(controls => gpipe.configured(data, controls).problem)"
    said = page.evaluate(ask, [data, settings])
    with pytest.raises(TooLargeError) as over:
        planned(*LIMITED, *TOO_LARGE, "recompute=auto")
    device = over.value.stage % 3
    assert f"device {device} lacks {size(over.value.missing_bytes)}" in said[0]
    assert "the model has only 7 layers" in said[1]
    assert "there are only 22 samples" in said[2]
    assert "use K = 6" in said[3]
    assert said[4] == "1B0 comes before 1F0, which it needs; put 1F0 first"


@pytest.mark.parametrize(
    "settings", [SPLIT, TEXT, SKIPPING], ids=["several tensors between layers", "lengths", "skips"]
)
def test_bytes_of_any_span_of_layers_are_exact(page: "Page", settings: tuple[str, ...]) -> None:
    config, profile = configure(*settings), traced(*settings)
    plan = plan_of(config, profile)
    data, layers = simulation_data(config, profile, plan), len(profile.costs)
    spans = [(first, end) for first in range(layers) for end in range(first + 1, layers + 1)]
    asked = [(first, end, samples) for first, end in spans for samples in (1, 2, 7)]
    found = page.evaluate("([data, all]) => all.map(one => gpipe.held(data, ...one))", [data, asked])
    for (first, end, samples), one in zip(asked, found, strict=True):
        of = ActivationMemory(profile.costs, profile.inputs, samples, profile.lengths)
        expected = of.held(first, end)
        if not profile.splits:  # not known, and said to be as much as before
            expected = expected._replace(weights=expected.graph)
        assert one == expected._asdict()


def test_a_layer_that_moves_is_simulated(page: "Page") -> None:
    data, plan = planned()
    moved = page.evaluate("data => gpipe.moves(data, {})", data)
    assert [one["step_seconds"] for one in moved] == sorted(one["step_seconds"] for one in moved)
    assert {(one["from_stage"], one["to_stage"]) for one in moved} == {(0, 1), (1, 0)}
    config, profile = configure(*SPLIT), traced(*SPLIT)
    for one in moved:
        cut = replace(config, partition=replace(config.partition, balance=tuple(one["balance"])))
        other = plan_of(cut, profile)
        assert one["step_seconds"] == pytest.approx(other.step_seconds, rel=1e-9)
        assert other.balance != plan.balance
