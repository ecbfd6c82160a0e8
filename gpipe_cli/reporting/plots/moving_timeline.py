"""The picture at the top of the README, an SVG that moves: one step on one device, cut in four, and in micro-batches.

The steps are simulated: a model whose forward takes 4 s and whose backward takes 8 s for the whole mini-batch, equal
stages, and nothing that takes time besides.
"""

from collections.abc import Iterator

from gpipe_cli.pipeline.schedule.breakdown import breakdown
from gpipe_cli.pipeline.schedule.named_schedules import order
from gpipe_cli.pipeline.schedule.simulator import StageCost, simulate
from gpipe_cli.pipeline.schedule.timeline import Timeline
from gpipe_cli.reporting.plots.palette import colour
from gpipe_cli.units import percent, plural

FORWARD, BACKWARD = 4.0, 8.0  # seconds of the whole mini-batch on one device
STEPS = ((1, 1), (4, 1), (4, 8))  # K, M
WIDTH, LEFT, BAR, GAP, TITLE = 880, 76, 22, 3, 30  # pixels
SECOND = (WIDTH - LEFT - 8) / (FORWARD + BACKWARD)  # pixels
RUN, HOLD = 9, 3  # seconds in which the picture is drawn, and then stays
_STYLE = f"""
text{{font:13px system-ui,sans-serif;fill:#25262c;dominant-baseline:central}}
.title{{font-size:15px;font-weight:600}}.row{{text-anchor:end}}.on{{text-anchor:middle;fill:#fff}}.F{{fill:#25262c}}
.paper{{fill:#fff}}.idle{{fill:url(#idle)}}.ground{{fill:#f1f1f4}}.hatch{{stroke:#cfd0d8;stroke-width:1.6}}
.head{{stroke:#25262c;stroke-width:1.5}}
.move{{animation:move {RUN + HOLD}s linear infinite}}
@keyframes move{{0%{{transform:translateX(0)}}{100 * RUN / (RUN + HOLD):.0f}%,100%{{transform:translateX({WIDTH}px)}}}}
@media(prefers-reduced-motion:reduce){{.move{{animation:none;transform:translateX({WIDTH}px)}}}}
@media(prefers-color-scheme:dark){{text{{fill:#e8e8ee}}.on{{fill:#fff}}.F{{fill:#25262c}}.paper{{fill:#17181c}}
.ground{{fill:#212329}}.hatch{{stroke:#3b3d47}}.head{{stroke:#e8e8ee}}}}
"""


def moving_timeline() -> str:
    """The picture as an SVG document, which needs no script. It stands still for who prefers that."""
    shapes: list[str] = []
    top = 0
    for partitions, micro_batches in STEPS:
        shapes += _step(partitions, micro_batches, top)
        top += TITLE + partitions * (BAR + GAP) + 8
    shown = "; ".join(_words(*step) for step in STEPS)
    hatching = '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" aria-label="{shown}">',
        f"<style>{_STYLE}</style>",
        f'<defs>{hatching}<path class="ground" d="M0 0H6V6H0z"/><path class="hatch" d="M0 0V6"/></pattern></defs>',
        f'<rect class="paper" width="{WIDTH}" height="{top}"/>',
        *shapes,
        f'<svg x="{LEFT}" width="{WIDTH - LEFT}" height="{top}"><g class="move">',
        f'<rect class="paper" width="{WIDTH}" height="{top}"/><path class="head" d="M0 0V{top}"/></g></svg>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _step(partitions: int, micro_batches: int, top: int) -> Iterator[str]:
    timeline = _timeline(partitions, micro_batches)
    yield f'<text class="title" x="2" y="{top + TITLE / 2}">{_words(partitions, micro_batches)}</text>'
    for stage, spans in enumerate(timeline.stages):
        y = top + TITLE + stage * (BAR + GAP)
        middle = y + BAR / 2 + 0.5
        yield f'<text class="row" x="{LEFT - 8}" y="{middle}">device {stage}</text>'
        yield f'<rect class="idle" x="{LEFT}" y="{y}" width="{_pixels(_end(timeline))}" height="{BAR}"/>'
        for action, start, end in spans:
            x, width = LEFT + start * SECOND, (end - start) * SECOND
            kind, fill = action.kind.value, colour(action.kind.value, action.micro_batch, micro_batches)
            yield f'<rect x="{x:.1f}" y="{y}" width="{width - 0.7:.1f}" height="{BAR}" fill="{fill}"/>'
            name = f"{kind}{action.micro_batch}" if width >= 20 else kind
            if width >= 10:
                yield f'<text class="on {kind}" x="{x + width / 2:.1f}" y="{middle}">{name}</text>'


def _timeline(partitions: int, micro_batches: int) -> Timeline:
    parts = partitions * micro_batches
    cost = StageCost(FORWARD / parts, FORWARD / parts, BACKWARD / parts)
    return simulate(order("gpipe", partitions, micro_batches), [cost] * partitions)


def _end(timeline: Timeline) -> float:
    return max(span.end_seconds for spans in timeline.stages for span in spans)


def _words(partitions: int, micro_batches: int) -> str:
    """`cut into 4 stages and 8 micro-batches: 4.1 s, idle 27.3 %`."""
    timeline = _timeline(partitions, micro_batches)
    seconds = _end(timeline)
    idle = 1 - breakdown(timeline, micro_batches, seconds).compute
    where = "one device" if partitions == 1 else f"cut into {plural(partitions, 'stage')}"
    pieces = f" and {plural(micro_batches, 'micro-batch')}" if micro_batches > 1 else ""
    return f"{where}{pieces}: {seconds:.1f} s, {'never idle' if partitions == 1 else f'idle {percent(idle)}'}"


def _pixels(seconds: float) -> str:
    return f"{seconds * SECOND:.1f}"
