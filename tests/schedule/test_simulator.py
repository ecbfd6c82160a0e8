"""The simulator is exact where arithmetic is known, and equals a walk through the order where it is not."""

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from schedule_runs import build

from gpipe_cli.schedule import named_schedules
from gpipe_cli.schedule.breakdown import breakdown
from gpipe_cli.schedule.dependencies import topological_order
from gpipe_cli.schedule.in_flight_memory import SavedAmounts, in_flight_counts, peak_bytes, peaks_of_devices
from gpipe_cli.schedule.named_schedules import SCHEDULES, forward_only
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Action, Kind, Schedule
from gpipe_cli.schedule.simulator import EdgeCost, Edges, StageCost, TieCost, ideal_bubble, simulate
from gpipe_cli.schedule.timeline import Event, EventKind

SHAPES = list(itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8, 13)))
COSTS = [(1, 2), (2, 1), (3, 7)]  # (forward, backward)


def equal(stages: int, forward: float, backward: float) -> list[StageCost]:
    return [StageCost(forward, forward, backward)] * stages


def step(schedule: Schedule, forward: int, backward: int) -> float:
    return simulate(schedule, equal(len(schedule.stages), forward, backward)).step_seconds


def test_a_step_of_interleaved() -> None:
    """v stages on each of P devices work M v (f + b), and fill and drain like one small stage: P - 1 of them. With
    fewer than P micro-batches each further stage of a device waits for the P - M that are not there."""
    for (devices, micro_batches), each, (f, b) in itertools.product(SHAPES, (2, 3), COSTS):
        schedule = named_schedules.order("interleaved", devices * each, micro_batches, devices)
        waits = devices - 1 + (each - 1) * max(0, devices - micro_batches)
        assert step(schedule, f, b) == (micro_batches * each + waits) * (f + b)


def test_a_step_of_zero_bubble() -> None:
    """3 M + K - 1 where F = I = W = 1, of which 1f1b with B = 2 takes 3 M + 3 (K - 1); K > M leaves less to fill
    waits with."""
    for k, m in SHAPES:
        schedule = build("zero_bubble", k, m, "never")
        expected = max(3 * m, 2 * m + k) + k - 1
        assert simulate(schedule, [StageCost(1, 1, 2, 1, 1)] * k).step_seconds == expected


def test_a_step_of_gpipe_and_1f1b() -> None:
    """The gradient's way back from stage K-1 to 0 costs K-1 backwards but no recomputation: those ran while waiting.

    Last stage: M + K - 1 forwards, then M times (recompute, backward), then K - 1 backwards of others:
    (M+K-1) (f+b) + M f; one f less if the last micro-batch is kept.
    """
    for (k, m), (f, b) in itertools.product(SHAPES, COSTS):
        for name, recompute, again in (
            ("gpipe", "never", 0), ("1f1b", "never", 0), ("gpipe", "always", m), ("1f1b", "always", m),
            ("gpipe", "except_last", m - 1),
        ):  # fmt: skip
            assert step(build(name, k, m, recompute), f, b) == (m + k - 1) * (f + b) + again * f


def one_after_another(
    schedule: Schedule, stages: Sequence[StageCost], edges: Edges, device_of_stage: Sequence[int]
) -> dict[Action, tuple[float, float]]:
    """When each action runs, found in an order in which what an action needs comes before it: an action starts when
    its device is free and its tensors are there, and a link takes one micro-batch after another."""
    order = topological_order(schedule, device_of_stage)
    free, link_free = defaultdict[int, float](float), defaultdict[tuple[Kind, int], float](float)
    spans: dict[Action, tuple[float, float]] = {}
    for a in order:
        cost, device = stages[a.stage], device_of_stage[a.stage]
        forward = a.kind is Kind.F
        sender = a.stage - 1 if forward else a.stage + 1
        there = 0.0
        if a.kind in (Kind.F, Kind.B, Kind.I) and 0 <= sender < len(stages):
            kinds = (Kind.F,) if forward else (Kind.B, Kind.I)
            (there,) = (end for b, (_, end) in spans.items() if b[1:] == (sender, a.micro_batch) and b.kind in kinds)
            if device_of_stage[sender] != device:
                edge = edges[min(a.stage, sender), max(a.stage, sender)]
                there = max(there, link_free[kinds[0], a.stage])
                there += edge.forward_seconds if forward else edge.backward_seconds
                link_free[kinds[0], a.stage] = there
        seconds = {
            Kind.F: cost.forward_seconds if a._replace(kind=Kind.R) in order else cost.graph_seconds,
            Kind.R: cost.graph_seconds,
            Kind.B: cost.backward_seconds,
            Kind.I: cost.inputs_seconds,
            Kind.W: cost.weights_seconds,
        }[a.kind]
        start = max(free[device], there)
        spans[a] = start, start + seconds
        free[device] = start + seconds
    return spans


def some_whole(schedule: Schedule, random_: random.Random) -> Schedule:
    """The schedule with some of its backwards in one piece, where their I is."""
    whole = {a[1:] for row in schedule for a in row if a.kind is Kind.I and random_.random() < 0.5}
    return Schedule(
        tuple(
            Action(Kind.B, a.stage, a.micro_batch) if a.kind is Kind.I and a[1:] in whole else a
            for a in row
            if a.kind is not Kind.W or a[1:] not in whole
        )
        for row in schedule
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_equals_a_simulation_without_events(name: str, recompute: str) -> None:
    random_ = random.Random(f"{name} {recompute}")
    for number in range(30):
        k, m = random_.randint(1, 6), random_.randint(1, 8)
        schedule = build(name, k, m, recompute)
        if schedule.split and number % 2:
            schedule = some_whole(schedule, random_)
        stages = [StageCost(*(random_.randint(1, 9) for _ in range(5))) for _ in range(k)]
        edges = {(n, n + 1): EdgeCost(random_.randint(0, 6), random_.randint(0, 6)) for n in range(k - 1)}
        rows = range(len(schedule))
        of_rows = [rows, sorted(random_.randrange(2) for _ in rows), [row % 2 for row in rows]][number % 3]
        device_of_stage = [of_rows[row] for row in schedule.row_of_stage]
        timeline = simulate(schedule, stages, edges, device_of_stage=device_of_stage)
        simulated = {s.action: (s.start_seconds, s.end_seconds) for spans in timeline.stages for s in spans}
        assert simulated == one_after_another(schedule, stages, edges, device_of_stage)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_stages_of_one_device_take_as_long_as_one_large_stage(name: str) -> None:
    """n equal stages on each of D devices: (M + D - 1) n (f + b), so that `ideal_bubble` of D devices is reached."""
    for (devices, m), n, (f, b) in itertools.product(SHAPES, (2, 3), COSTS):
        if name == "gpipe" or n * devices <= 4:  # 1f1b lets fewer micro-batches in than many large stages have
            schedule, device_of_stage = build(name, n * devices, m, "never"), [k // n for k in range(n * devices)]
            found = simulate(schedule, equal(n * devices, f, b), device_of_stage=device_of_stage)
            assert found.step_seconds == (m + devices - 1) * n * (f + b)
            assert breakdown(found, m).bubble == pytest.approx(ideal_bubble(devices, m))


def test_stages_that_compute_at_the_same_time_slow_each_other_down() -> None:
    """By hand: 0F0 alone until 1; then 0F1 and 1F0 share until 3 (factor 2), then 1F1 alone, and back likewise. The
    last factor holds for all more. With factor n while n compute, work is done at the pace of one, whoever does it."""
    timeline = simulate(build("gpipe", 2, 2, "never"), equal(2, 1, 1), slowdown=[1, 2])
    ends = {str(s.action): s.end_seconds for spans in timeline.stages for s in spans}
    assert ends == {"0F0": 1, "0F1": 3, "1F0": 3, "1F1": 4, "1B1": 5, "1B0": 7, "0B1": 7, "0B0": 8}
    three = [simulate(build("gpipe", 3, 4, "never"), equal(3, 1, 1), slowdown=of) for of in ([1, 2], [1, 2, 2])]
    assert three[0].step_seconds == three[1].step_seconds
    for k, m in SHAPES:
        stages = [StageCost(1 / (1 + n), 1 / (1 + n), n / 7) for n in range(k)]
        work = m * sum(stage.forward_seconds + stage.backward_seconds for stage in stages)
        shared = simulate(build("gpipe", k, m, "never"), stages, slowdown=range(1, k + 1))
        assert shared.step_seconds == pytest.approx(work, rel=1e-12)


def test_updates_follow_a_stages_last_action_and_share_the_machine() -> None:
    stages = [StageCost(1, 1, 1, update_seconds=3), StageCost(1, 1, 1, update_seconds=2)]
    timeline = simulate(build("gpipe", 2, 1, "never"), stages)
    assert timeline.step_seconds == 4  # of the actions
    assert timeline.events[1][-1] == Event(EventKind.UPDATE, 3, 5, None)
    assert timeline.events[0][-1] == Event(EventKind.UPDATE, 4, 7, None)
    slowed = simulate(build("gpipe", 2, 1, "never"), stages, slowdown=[1, 2])
    # 0B0 and then 0's update share with 1's: 3 + 4, then 0's update has 2 of 3 left.
    assert slowed.events[1][-1].end_seconds == 7
    assert slowed.events[0][-1].end_seconds == 9


def test_a_tied_weight_is_updated_when_all_its_stages_have_its_gradient() -> None:
    """By hand: stage 2 is done at 5, stage 0 at 9, from when on the sums travel for 2; stage 1 has nothing to wait for.
    Stages that share a device have nothing to send."""
    stages = [StageCost(1, 1, 2, update_seconds=1)] * 3
    ties = [TieCost((0, 2), 2.0)]
    timeline = simulate(build("gpipe", 3, 1, "never"), stages, ties=ties)
    assert [event[-2:] for event in timeline.events] == [
        (Event(EventKind.TRANSFER, 9, 11, None), Event(EventKind.UPDATE, 11, 12, None)),
        (timeline.events[1][-2], Event(EventKind.UPDATE, 7, 8, None)),
        (Event(EventKind.TRANSFER, 9, 11, None), Event(EventKind.UPDATE, 11, 12, None)),
    ]
    alone = [simulate(build("gpipe", 3, 1, "never"), stages, device_of_stage=[0] * 3, ties=of) for of in (ties, [])]
    assert alone[0] == alone[1]


def test_waiting_and_exposed_transfers() -> None:
    timeline = simulate(build("gpipe", 2, 2, "never"), equal(2, 1, 2), {(0, 1): EdgeCost(0.5, 0.25)})
    first, second = timeline.events
    backward, forward = Action(Kind.B, 0, 1), Action(Kind.F, 1, 0)
    assert second == (Event(EventKind.WAITING, 0, 1, forward), Event(EventKind.TRANSFER, 1, 1.5, forward))
    assert first == (  # free at 2, 1B1 ends at 5.5; 1B0 at 7.5, sent while 0B1 ran until 7.75
        Event(EventKind.WAITING, 2, 5.5, backward),
        Event(EventKind.TRANSFER, 5.5, 5.75, backward),
    )
    for spans, events in zip(timeline.stages, timeline.events, strict=True):  # nothing overlaps, nothing is left out
        pieces = sorted([(p.start_seconds, p.end_seconds) for p in (*spans, *events)])
        assert pieces[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))


def peak_live(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """For each stage, the most graphs and the most inputs held, at whatever moments."""
    stages = [list(in_flight_counts(actions)) for actions in schedule.stages]
    return tuple((max(held.graph for held in stage), max(held.input for held in stage)) for stage in stages)


def test_peak_of_kept_micro_batches() -> None:
    for k, m in SHAPES:
        for stage in range(k):
            one, all_ = (peak_live(build(name, k, m, "never"))[stage] for name in ("1f1b", "gpipe"))
            assert (one, all_) == ((min(k - stage, m), 0), (m, 0))
            one, all_ = (peak_live(build(name, k, m, "always"))[stage] for name in ("1f1b", "gpipe"))
            assert (one, all_) == ((1, min(k - stage, m)), (1, m))
            assert peak_live(build("gpipe", k, m, "except_last"))[stage] == (1, m - 1)
    assert peak_live(forward_only(2, 4)) == ((0, 0), (0, 0))


def held_now(
    begun: Sequence[Action], ended: set[Action], actions: Sequence[Action], sizes: Sequence[SavedAmounts]
) -> int:
    """The bytes that a stage holds, from what it has begun and ended so far."""
    total, stage = 0, actions[0].stage
    for m, size in enumerate(sizes):
        f, r, b, i, w = (Action(kind, stage, m) for kind in (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W))
        if f in begun and b not in ended and i not in ended:
            total += size.input if r in actions and r not in begun else size.graph
        total += size.gradients if i in begun and i not in ended else 0
        total += size.weights if i in ended and w not in ended else 0
    return total


@pytest.mark.parametrize("seed", range(20))
def test_stages_of_a_device_are_not_at_their_fullest_together(seed: int) -> None:
    """Their peak is at the moment when their sum is greatest, counted from nothing at every moment."""
    random_ = random.Random(seed)
    k, m, name = random_.randint(2, 6), random_.randint(1, 6), random_.choice(SCHEDULES)
    chosen = tuple(frozenset(m for m in range(m) if random_.random() < 0.5) for _ in range(k))
    schedule = some_whole(build(name, k, m, chosen), random_)
    sizes = [[SavedAmounts(*(random_.randint(0, 9) for _ in range(4))) for _ in range(m)] for _ in range(k)]
    placed = [random_.randrange(3) for _ in range(k)]
    device_of_stage = [sorted({*placed}).index(device) for device in placed]
    most = [0] * len({*placed})
    begun: list[Action] = []
    ended: set[Action] = set()
    for action in topological_order(schedule, device_of_stage):
        begun.append(action)
        device = device_of_stage[action.stage]
        of_device = [stage for stage in range(k) if device_of_stage[stage] == device]
        together = sum(held_now(begun, ended, schedule.stages[stage], sizes[stage]) for stage in of_device)
        most[device] = max(most[device], together)
        ended.add(action)
    assert peaks_of_devices(schedule, sizes, device_of_stage) == tuple(most)
    alone = peak_bytes(schedule, sizes)
    assert peaks_of_devices(schedule, sizes, range(k)) == alone
