"""The pictures of `gpipe help` for K, M, the bubble, schedules and recomputation: a step of a few stages, drawn as in
the paper's Figure 2(c), and its figures. All is computed from the schedules, given K, M and the costs of a stage."""

from collections.abc import Iterator, Sequence

from gpipe_cli.reporting.run.lines import align, wrap
from gpipe_cli.schedule.breakdown import breakdown
from gpipe_cli.schedule.dependencies import grid
from gpipe_cli.schedule.in_flight_memory import SavedAmounts, in_flight_counts
from gpipe_cli.schedule.named_schedules import ORDERS, build
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Kind, Schedule
from gpipe_cli.schedule.simulator import FREE_TRANSFERS, StageCost, ideal_bubble, simulate
from gpipe_cli.schedule.timeline import Timeline
from gpipe_cli.units import percent, plural

STAGES, MICRO_BATCHES = 3, 4
STAGE_COUNTS, MICRO_BATCH_COUNTS = (2, 3, 4, 8), (1, 2, 4, 8, 16, 32)  # rows and columns of the table of bubbles
# Equal stages: a backward takes as long as two forwards, half of it for the gradients of the inputs.
STAGE_COST = StageCost(1, 1, 2, inputs_seconds=1, weights_seconds=1)
ACTION_NAMES = {
    Kind.F: "F = forward",
    Kind.R: "R = recomputation",
    Kind.B: "B = backward",
    Kind.I: "I = backward for inputs",
    Kind.W: "W = backward for weights",
}


def draw_topic(topic: str, width: int) -> Iterator[str]:
    """The lines of the picture of `topic`, as `help._normalize_topic` spells it, at most `width` wide; none without a
    picture."""
    match topic:
        case "k" | "partition" | "stage" | "m" | "micro batch" | "bubble":
            yield from _draw_step("gpipe", build("gpipe", STAGES, MICRO_BATCHES, "never"), width)
            bubble = percent(ideal_bubble(STAGES, MICRO_BATCHES))
            yield f"bubble: (K-1)/(M+K-1) = {STAGES - 1}/{MICRO_BATCHES + STAGES - 1} = {bubble}"
            yield from _draw_bubbles()
        case _ if (name := topic.replace(" ", "_")) in ORDERS:
            partitions = 2 * STAGES if ORDERS[name].placement else STAGES
            yield from _draw_step(name, build(name, partitions, MICRO_BATCHES, "never", STAGES), width)
        case "auto":
            yield from _draw_auto(width)
        case "recomputation" | "recompute":
            for mode in RECOMPUTE_MODES:
                yield from _draw_recompute_mode(mode, width)
        case "alway" | "except last" | "never":  # `help._normalize_topic` removes a final s
            mode = next(mode for mode in RECOMPUTE_MODES if mode.startswith(topic.replace(" ", "_")))
            yield from _draw_recompute_mode(mode, width)


def _draw_step(name: str, schedule: Schedule, width: int, recompute: str = "never") -> Iterator[str]:
    shares = breakdown(_simulate_equal_stages(schedule), schedule.micro_batches)
    kinds = [kind for kind in Kind if any(action.kind is kind for row in schedule for action in row)]
    devices = "" if len(schedule) == len(schedule.stages) else f" on {len(schedule)} devices"
    yield f"schedule={name} recompute={recompute}: K = {len(schedule.stages)} stages{devices}, M = {MICRO_BATCHES}"
    yield from grid(schedule, width=width).splitlines()
    yield from wrap(f"{', '.join(ACTION_NAMES[kind] for kind in kinds)}, drawn to equal length", width)
    idle = percent(1 - shares.compute - shares.recompute)
    yield from wrap(f"idle: {idle} of the time, if stages are equal and a backward takes two forwards", width)
    kept = [
        max(held.graph + held.input + held.weights for held in in_flight_counts(actions)) for actions in schedule.stages
    ]
    yield from wrap(f"in flight: at most {_counts_text(kept)}", width)


def _draw_auto(width: int) -> Iterator[str]:
    from gpipe_cli.schedule.search import Problem, search_order  # numpy comes with it

    problem = Problem(
        [STAGE_COST] * STAGES, FREE_TRANSFERS, (), range(STAGES), MICRO_BATCHES, [SavedAmounts(1, 0)] * STAGES,
        activation_budget=None, recompute="never", split=True,
    )  # fmt: skip
    best, tried = search_order(problem)
    assert best is not None
    yield from _draw_step("auto", best.schedule, width)
    yield f"the best of {len(tried)} orders tried, for equal stages: {best.name}"


def _draw_recompute_mode(mode: str, width: int) -> Iterator[str]:
    schedule, kept = (build("gpipe", STAGES, MICRO_BATCHES, recompute) for recompute in (mode, "never"))
    yield from _draw_step("gpipe", schedule, width, mode)
    graphs = [max(held.graph for held in in_flight_counts(actions)) for actions in schedule.stages]
    yield f"activations kept: of at most {_counts_text(graphs)}"
    if mode != "never":
        times = _simulate_equal_stages(schedule).step_seconds / _simulate_equal_stages(kept).step_seconds
        yield f"a step takes {times:.2f} times as long as with recompute=never"


def _simulate_equal_stages(schedule: Schedule) -> Timeline:
    """A step of equal stages: a forward takes 1 s, transfers take no time."""
    return simulate(schedule, [STAGE_COST] * len(schedule.stages))


def _draw_bubbles() -> Iterator[str]:
    yield ""
    rows = [(f"K = {k}", [percent(ideal_bubble(k, m)) for m in MICRO_BATCH_COUNTS]) for k in STAGE_COUNTS]
    for label, line in align([("bubble", [f"M = {m}" for m in MICRO_BATCH_COUNTS]), *rows]):
        yield f"{label:<6}  {line}"


def _counts_text(counts: Sequence[int]) -> str:
    """`4 micro-batches on each stage`, `3, 2, 1 micro-batches on stages 0, 1, 2`."""
    if len(set(counts)) == 1:
        return f"{plural(counts[0], 'micro-batch')} on each stage"
    return f"{', '.join(map(str, counts))} micro-batches on stages {', '.join(map(str, range(len(counts))))}"
