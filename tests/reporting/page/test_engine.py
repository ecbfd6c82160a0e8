"""The JavaScript that the page simulates with, in a real browser, against the Python that runs and plans."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import NEEDED, opened_page
from plan_runs import EVEN, HOURGLASS, plan_of, traced
from training_runs import configure

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.planner.cost_model import MeasuredCosts, predicted_costs
from gpipe_cli.planner.make_plan import baseline_of, make_plan
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.process_layout import layout_of
from gpipe_cli.planner.shared_layers import Shared
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.reporting.page.page import PageContext, write_page
from gpipe_cli.schedule.breakdown import breakdown
from gpipe_cli.schedule.dependencies import ScheduleError, check
from gpipe_cli.schedule.in_flight_memory import SavedAmounts, bytes_per_action, peak_skip_bytes
from gpipe_cli.schedule.named_schedules import ORDERS, order
from gpipe_cli.schedule.placement import PLACEMENTS, place
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Schedule, with_recomputation
from gpipe_cli.schedule.schedule_file import read_schedule
from gpipe_cli.schedule.simulator import EdgeCost, Edges, StageCost, TieCost, simulate
from gpipe_cli.system.machine import usable_cores

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = NEEDED
SETTINGS = (*EVEN, "hardware=v100", "batch_size=22", "partitions=2")
SPLIT = (*SETTINGS, "schedule=zero_bubble")  # so that both halves of backwards are traced


KNOWN = ("gpipe", "1f1b", "interleaved", "zero_bubble")  # orders that the page makes for any setting


@cache
def own() -> tuple[TrainConfig, ModelProfile]:
    """The settings that the page begins with, and the model, traced once."""
    return configure(*SPLIT), traced(*SPLIT)


def data_of(config: TrainConfig, profile: ModelProfile) -> dict[str, Any]:
    return simulation_data(plan_of(config, profile))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Page]":
    path = tmp_path_factory.mktemp("page") / "pipeline.html"
    write_page(path, "AmoebaNet-D on digits", data_of(*own()), (), PageContext())
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
  return {
    rows: rows.map(row => row.map(gpipe.key)),
    spans: timeline.spans.map(of => of.map(({action, start, end}) => [gpipe.key(action), start, end])),
    events: timeline.events.map(of => of.map(({what, start, end, action}) =>
      [what, start, end, action && gpipe.key(action)])),
    shares: gpipe.breakdown(timeline, M, seconds),
    held: gpipe.stagesOf(rows).map((of, k) => gpipe.memory(of, sizes[k])),
    waiting: gpipe.peakSkipBytes(rows, skips, costs.device_of_stage),
    checked: gpipe.check(rows), idle, csv: gpipe.csv(rows, timeline.device_of_stage),
  };
})"""


def costs_of(
    stages: Sequence[StageCost],
    edges: Edges,
    slowdown: Sequence[float],
    device_of_stage: Sequence[int],
    ties: Sequence[TieCost],
) -> dict[str, Any]:
    """As the page's simulator takes them."""

    def sent(edge: EdgeCost) -> dict[str, float]:
        return {"forward": edge.forward_seconds, "backward": edge.backward_seconds}

    keys = ("forward", "graph", "backward", "inputs", "weights", "update", "sum")
    return {
        "stages": [dict(zip(keys, stage, strict=True)) for stage in stages],
        "edges": [sent(edge) for (sender, receiver), edge in edges.items() if receiver == sender + 1],
        "slowdown": slowdown,
        "device_of_stage": device_of_stage,
        "ties": [tie._asdict() for tie in ties],
        "skips": [
            {"sender": sender, "receiver": receiver, **sent(edge)}
            for (sender, receiver), edge in edges.items()
            if receiver > sender + 1
        ],
    }


def random_case(chance: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """What JavaScript is asked, and Python's answer."""
    name, devices = chance.choice(KNOWN), chance.randint(1, 4)
    K = devices * chance.randint(1, 8 // devices) if name == "interleaved" else chance.randint(1, 8)
    M = chance.randint(1, 32)
    recompute = chance.choice(RECOMPUTE_MODES)
    stages = [
        StageCost(*(chance.uniform(0.1, 2) for _ in range(5)), chance.choice((0.0, 0.3)), chance.choice((0.0, 0.5)))
        for _ in range(K)
    ]
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
    skips = chance.sample(apart, chance.randint(0, min(4, len(apart))))
    edges = {}
    if chance.random() < 0.5:
        edges = {(k, k + 1): EdgeCost(chance.uniform(0, 1), chance.uniform(0, 1)) for k in range(K - 1)}
        edges |= {ends: EdgeCost(chance.uniform(0, 5), chance.uniform(0, 5)) for ends in skips}
    waiting = {ends: [(chance.randint(0, 1 << 40), chance.randint(0, 1 << 40)) for _ in range(M)] for ends in skips}
    sizes = [[SavedAmounts(*(chance.randint(0, 1 << 40) for _ in range(4))) for _ in range(M)] for _ in range(K)]

    schedule = with_recomputation(order(name, K, M, devices), recompute)
    check(schedule)
    timeline = simulate(schedule, stages, edges, slowdown, device_of_stage, ties)
    seconds = max([timeline.end_seconds, *(e.end_seconds for of in timeline.events for e in of)]) * 1.1
    shares = breakdown(timeline, M, seconds)
    asked = {
        "name": name, "K": K, "M": M, "devices": devices, "recompute": recompute, "seconds": seconds,
        "costs": costs_of(stages, edges, slowdown, device_of_stage, ties),
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
        "shares": shares._asdict(),
        "held": [list(bytes_per_action(of, size)) for of, size in zip(schedule.stages, sizes, strict=True)],
        "waiting": list(peak_skip_bytes(schedule, waiting, device_of_stage)),
        "checked": None,
        "idle": {why: value for why, value in idle.items() if value > 1e-9},
    }  # fmt: skip
    return asked, expected


def test_simulations_are_those_of_python(page: "Page", tmp_path: Path) -> None:
    """Every action's times, every event, every share, all bytes held; idle regions add up to their shares, and what is
    saved is the order that is shown."""
    cases = [random_case(random.Random(seed)) for seed in range(24)]
    for (asked, expected), found in zip(cases, page.evaluate(ENGINE, [asked for asked, _ in cases]), strict=True):
        file = tmp_path / f"{asked['name']}.csv"
        file.write_text(found.pop("csv"), encoding="utf-8")
        read_schedule.cache_clear()
        saved = read_schedule(str(file), asked["K"], asked["M"])
        assert [list(map(str, actions)) for actions in saved.stages] == [
            [key for key, *_ in spans] for spans in expected["spans"]
        ]
        found["idle"] = {why: value for why, value in found["idle"].items() if value > 1e-9}
        assert_close(found, expected, asked["name"])


def test_an_order_is_refused_where_python_refuses_it(page: "Page") -> None:
    """What a move within a row may lead to."""
    chance, schedules = random.Random(0), []
    for _ in range(200):
        K, M = chance.randint(1, 4), chance.randint(1, 4)
        name = chance.choice(("gpipe", "1f1b", "zero_bubble"))
        rows = [list(row) for row in with_recomputation(order(name, K, M), chance.choice(RECOMPUTE_MODES))]
        for _ in range(chance.randint(0, 3)):
            row = chance.choice(rows)
            row.insert(chance.randrange(len(row)), row.pop(chance.randrange(len(row))))
        schedules.append(Schedule(map(tuple, rows)))
    asked = [[list(map(str, row)) for row in schedule] for schedule in schedules]
    found = page.evaluate("all => all.map(rows => gpipe.check(rows.map(row => row.map(gpipe.action))))", asked)
    for schedule, refusal in zip(schedules, found, strict=True):
        try:
            check(schedule)
        except ScheduleError:
            assert refusal, schedule
        else:
            assert refusal is None, schedule
    assert 50 < len(list(filter(None, found))) < 150


def test_stages_are_on_the_devices_of_python(page: "Page") -> None:
    asked = [(name, K, each) for name in PLACEMENTS for K in range(1, 13) for each in range(1, K + 1)]
    for (name, K, each), found in zip(
        asked, page.evaluate("all => all.map(one => gpipe.placeStages(...one))", asked), strict=True
    ):
        config = replace(own()[0], partitions=K, stages_per_process=each, placement=name)
        assert tuple(found) == layout_of(config).row_of_stage, (name, K, each)


# --- what settings lead to

OTHERS = tuple(
    {"partitions": K, "micro_batches": M, "schedule": schedule, "recompute": recompute, "stages_per_process": each,
     "placement": placement}
    for K, M, schedule, recompute, each, placement in (
        (2, 4, "zero_bubble", "except_last", 1, "neighbours"), (1, 1, "zero_bubble", "except_last", 1, "neighbours"),
        (4, 4, "zero_bubble", "except_last", 1, "neighbours"), (7, 4, "gpipe", "never", 1, "neighbours"),
        (4, 8, "1f1b", "never", 1, "neighbours"), (5, 7, "gpipe", "always", 1, "neighbours"),
        (6, 2, "interleaved", "except_last", 2, "looped"), (6, 11, "gpipe", "except_last", 3, "neighbours"),
        (6, 11, "1f1b", "except_last", 2, "v"), (5, 10, "zero_bubble", "never", 2, "looped"),
    )
)  # fmt: skip
TIED = (
    "model=transformer_lm", "~presets", "dataset=synthetic_text", "dataset.vocabulary=400", "model.length=16",
    "model.layers=6", "model.width=16", "model.hidden=32", "model.heads=2", "model.tie_embeddings=true",
    "batch_size=24", "device=cpu", "hardware=v100", "ema_decay=0.9",
)  # fmt: skip


def with_cut(config: TrainConfig, balance: Sequence[int]) -> TrainConfig:
    return replace(config, partition=replace(config.partition, balance=tuple(balance)))


SKIPPING = (*HOURGLASS, *SPLIT[len(EVEN) :], "precision=bfloat16")


def test_skips_are_as_in_a_plan(page: "Page") -> None:
    """From the plan of two stages: the wait for skips and the bytes of those that wait, where they go past stages, to
    the next one, to another one of the same device, or nowhere."""
    config, profile = configure(*SKIPPING), traced(*SKIPPING)
    config = replace(config, hardware=replace(config.hardware, link_gb_per_second=0.02))  # so that links matter
    data = data_of(config, profile)
    others = [
        {"partitions": K, "micro_batches": M, "schedule": schedule, "stages_per_process": each, "recompute": recompute}
        for K, M, schedule, each, recompute in (
            (1, 2, "gpipe", 1, "never"), (2, 4, "1f1b", 1, "never"), (3, 5, "zero_bubble", 1, "never"),
            (4, 7, "gpipe", 1, "always"), (5, 8, "1f1b", 1, "except_last"), (6, 8, "gpipe", 2, "never"),
            (6, 9, "interleaved", 2, "except_last"), (9, 8, "zero_bubble", 1, "never"), (16, 3, "1f1b", 1, "always"),
        )
    ]  # fmt: skip
    found = page.evaluate("([data, all]) => all.map(controls => gpipe.configure(data, controls))", [data, others])
    long = 0
    for other, one in zip(others, found, strict=True):
        assert one.get("problem") is None
        plan = plan_of(with_cut(replace(config, **other), one["balance"]), profile)
        assert_close(one["step_seconds"], plan.step_seconds, str(other))
        memory = [{**of, "held": max(of["held"])} for of in one["memory"]]
        assert memory == [
            {"weights": m.weights_bytes, "gradients": m.gradients_bytes, "optimizer": m.optimizer_bytes,
             "buffers": m.buffers_bytes, "workspace": m.workspace_bytes, "held": m.activations_bytes}
            for m in plan.memory
        ], other  # fmt: skip
        long += bool(one["skips"])
    assert long == 7  # of three stages and more


def test_tied_weights_are_as_in_a_plan(page: "Page") -> None:
    """From the plan of two stages: a weight that one stage has twice, or two stages once; the wait for its gradient."""
    config = configure(*TIED, "partitions=2")
    data = simulation_data(plan_of(config, profile_model(config)))
    for partitions in (1, 2, 4):
        plan = plan_of(configure(*TIED, f"partitions={partitions}"), profile_model(config))
        found = page.evaluate(
            "([data, controls]) => gpipe.configure(data, controls)", [data, {"partitions": partitions}]
        )
        assert_close(found["step_seconds"], plan.step_seconds)
        fixed = [{key: of[key] for key in ("weights", "gradients", "optimizer", "buffers")} for of in found["memory"]]
        assert fixed == [
            {"weights": m.weights_bytes, "gradients": m.gradients_bytes, "optimizer": m.optimizer_bytes,
             "buffers": m.buffers_bytes} for m in plan.memory
        ]  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
def test_other_settings_give_the_numbers_of_their_plan(page: "Page", replicas: int) -> None:
    """From the data of one plan: the cut, the order, the step, its shares, the memory of each stage and device. The cut
    is the one for the M of that plan, whatever M is tried."""
    config, profile = own()
    config = replace(config, replicas=replicas)
    found = page.evaluate(
        """([data, all]) => all.map(controls => {
          const {problem, balance, rows, step_seconds, breakdown, memory, device_memory, samples_per_second} =
            gpipe.configure(data, controls);
          return {problem: problem || null, balance, rows: rows.map(row => row.map(gpipe.key)), step_seconds, breakdown,
            memory: memory.map(({held, ...rest}) => ({...rest, held: Math.max(...held)})), samples_per_second,
            devices: device_memory.map(of =>
              of.weights + of.gradients + of.optimizer + of.buffers + of.workspace + Math.max(...of.held))};
        })""",
        [data_of(config, profile), OTHERS],
    )
    for other, one in zip(OTHERS, found, strict=True):
        asked = replace(config, **other)
        if asked.micro_batches == config.micro_batches and asked.stages_per_process == 1:
            assert one["balance"] == list(plan_of(asked, profile).balance)
        plan = plan_of(with_cut(asked, one["balance"]), profile)
        shares = plan.breakdown
        assert_close(one, {
            "problem": None,
            "balance": list(plan.balance),
            "rows": [list(map(str, row)) for row in plan.schedule],
            "step_seconds": plan.step_seconds,
            "breakdown": shares._asdict(),
            "memory": [{"weights": m.weights_bytes, "gradients": m.gradients_bytes, "optimizer": m.optimizer_bytes,
                        "buffers": m.buffers_bytes, "workspace": m.workspace_bytes,
                        "held": m.activations_bytes} for m in plan.memory],
            "samples_per_second": 22 / plan.step_seconds, "devices": list(plan.device_bytes),
        }, str(other))  # fmt: skip


def timed(layers: int) -> MeasuredCosts:
    """Layers that slow each other down by 1.3 while two processes compute."""
    small, large = ([(n * k, n * k, 3 * n * k) for k in range(1, layers + 1)] for n in (0.001, 0.003))
    return MeasuredCosts((1, 4), (small, large), [0.001] * layers, 0.001, 1.3, 2, (usable_cores(), 1.7), 0.0002, 1e-9)


def test_a_run_on_this_machine_is_simulated_as_it_was_planned(page: "Page") -> None:
    """If processes share cores they slow each other down, and stages of one process take turns; on separate devices
    there is no slowdown, and only stages of the same process take turns."""
    for settings in (("partitions=2",), ("partitions=3", "executor=in_process"), ("partitions=2", "replicas=2")):
        config, profile = configure(*EVEN, "schedule=1f1b", *settings), traced(*EVEN)
        costs = predicted_costs(config, profile, layout_of(config), timed(len(profile.costs)))
        plan = make_plan(config, profile, costs, layout_of(config))
        data = simulation_data(plan)
        baseline, slower = (
            page.evaluate(
                "([data, backward_factor]) => gpipe.baselineStep(data, {backward_factor}).step_seconds", given
            )
            for given in ([data, 1], [data, 2])
        )
        known = baseline_of(plan)
        assert known
        assert baseline == pytest.approx(known.step_seconds)
        assert slower - baseline == pytest.approx(known.stage_costs[0].backward_seconds)
        own = {"schedule": "1f1b"}  # whose order is made again
        found = page.evaluate(
            """([data, own]) => [{}, own, {...own, own_devices: true}].map(one =>
              gpipe.configure({...data}, one).step_seconds)""",
            [{**data, "setting": {**data["setting"], "schedule": "gpipe"}}, own],
        )
        assert found[1] == pytest.approx(plan.step_seconds, rel=1e-9)
        assert found[0] == pytest.approx(plan.step_seconds, rel=1e-9)
        alone = make_plan(config, profile, replace(costs, slowdown=()), layout_of(config))
        assert found[2] == pytest.approx(alone.step_seconds, rel=1e-9)
        assert (found[2] < 0.99 * found[1]) == (costs.slowdown[len(set(plan.device_of_stage)) - 1] > 1)


def test_of_other_schedules_the_page_knows_the_order_of_the_plan_only(page: "Page") -> None:
    config, profile = own()
    config = replace(config, schedule="zbv", partitions=4, recompute="never")
    plan = plan_of(config, profile)
    same, again, other = page.evaluate(
        """data => [{backward_factor: 2}, {recompute: "always"}, {partitions: 3}].map(controls => {
          const {rows, problem} = gpipe.configure(data, controls);
          return rows ? rows.map(row => row.map(gpipe.key)) : problem;
        })""",
        simulation_data(plan),
    )
    assert same == [list(map(str, row)) for row in plan.schedule]
    assert again == [list(map(str, row)) for row in with_recomputation(plan.schedule, "always")]
    assert "choose another schedule" in other


def test_a_cut_keeps_together_what_layers_share_or_the_page_tells_why_not(page: "Page") -> None:
    config, profile = own()
    tied = replace(profile, shared=(Shared(1, 4, "they share"),))
    data = data_of(config, tied)
    for partitions in (2, 4, 5):
        found = page.evaluate("([data, K]) => gpipe.configure(data, {partitions: K})", [data, partitions])
        if len(profile.costs) - 3 < partitions:
            assert found["problem"] == "they share"
        else:
            assert found["balance"] == list(plan_of(replace(config, partitions=partitions), tied).balance)


def test_what_cannot_be_is_said(page: "Page") -> None:
    """And of recompute=auto: nothing is recomputed if that fits the memory, else all that is worth it."""
    config, profile = own()
    config = replace(config, recompute="auto", hardware=replace(config.hardware, memory_gib=0.006))
    interleaved = {"schedule": "interleaved", "stages_per_process": 2}
    ask = "([data, all]) => all.map(controls => gpipe.configure(data, controls))"
    large, many, uneven, wrong, small, tight = page.evaluate(ask, [data_of(config, profile), [
        {"partitions": 6, "micro_batches": 2, **interleaved}, {"partitions": 8}, {"partitions": 5, **interleaved},
        {"rows": [[{"kind": kind, "stage": k, "micro_batch": 0} for kind in "BF"] for k in (0, 1)]},
        {"partitions": 4, "micro_batches": 16}, {"partitions": 1, "micro_batches": 8, "schedule": "gpipe"},
    ]])  # fmt: skip
    assert re.search(r"device \d lacks \d", large["problem"])
    assert "K = 8" in many["problem"]
    assert "use K = 6" in uneven["problem"]
    assert wrong["problem"] == "0B0 needs 0F0, which comes after it"
    recomputed = [any(a["kind"] == "R" for row in of["rows"] for a in row) for of in (small, tight)]
    assert recomputed == [False, True]
