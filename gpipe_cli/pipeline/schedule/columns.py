"""A schedule as columns of numbers, and its simulation by them: for a thousand devices with thousands of micro-batches.

Such a schedule has 8 to 25 million actions: as objects of Python they would take gigabytes, and as many spans of a
timeline more. As columns they take 9 bytes each, and the rows that are made one at a time (`named_schedules.rows`) are
objects for a moment only.

Times are those of `simulator.simulate`, to the bit, as long as devices do not slow each other down and each row has a
device: then the start of an action depends only on its own row and on the action that it needs, whatever else happens
at that time. So the simulation goes in rounds: in each, all devices whose next action can begin perform it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.breakdown import Breakdown, DeviceTime, shares
from gpipe_cli.pipeline.schedule.held import Held, changed_bytes
from gpipe_cli.pipeline.schedule.schedule import RECOMPUTE, RETURNS, Action, Kind, Retain
from gpipe_cli.pipeline.schedule.simulator import EdgeCost, StageCost, TieCost
from gpipe_cli.pipeline.schedule.timeline import EventKind

Whole = NDArray[np.int32]
Seconds = NDArray[np.float64]
_KINDS = 128  # a kind is the ASCII code of its letter


def _code(kind: Kind) -> int:
    return ord(kind.value)


_RETAINED = {retain: np.uint8(number) for number, retain in enumerate(Retain)}


@dataclass(frozen=True, eq=False)
class Columns:
    """The A actions of all rows, one row after the other; `ends[r]` is the index after the last action of row r."""

    kind: NDArray[np.uint8]  # (A,), the letter of each action in ASCII
    stage: Whole  # (A,)
    micro_batch: Whole  # (A,)
    ends: NDArray[np.intp]  # (P,)

    @classmethod
    def of(cls, rows: Iterable[Sequence[Action]]) -> Self:
        """The columns of a schedule, or of rows that are made while they are asked for."""
        found = []
        for row in rows:
            letters = np.frombuffer("".join([a.kind for a in row]).encode(), np.uint8)
            stages, micro_batches = np.array([a.stage for a in row], np.int32), [a.micro_batch for a in row]
            found.append((letters, stages, np.array(micro_batches, np.int32)))
        kind, stage, micro_batch = (np.concatenate(column) for column in zip(*found, strict=True))
        return cls(kind, stage, micro_batch, np.cumsum([len(letters) for letters, _, _ in found]))

    @property
    def firsts(self) -> NDArray[np.intp]:
        """The index of the first action of each row."""
        return np.concatenate([[0], self.ends[:-1]])

    @cached_property
    def stages(self) -> int:
        return 1 + int(self.stage.max(initial=-1))

    @cached_property
    def micro_batches(self) -> int:
        return 1 + int(self.micro_batch.max(initial=-1))

    @cached_property
    def row_of_stage(self) -> NDArray[np.intp]:
        found = np.zeros(self.stages, np.intp)
        for row, (first, end) in enumerate(zip(self.firsts, self.ends, strict=True)):
            found[self.stage[first:end]] = row
        return found

    @cached_property
    def pieces(self) -> Whole:
        """For each action, the index of its stage and micro-batch: K M of them."""
        return self.stage * np.int32(self.micro_batches) + self.micro_batch

    @cached_property
    def returns(self) -> NDArray[np.bool_]:
        """Whether each action sends gradients back."""
        return np.isin(self.kind, [_code(kind) for kind in RETURNS])

    @cached_property
    def retained(self) -> NDArray[np.uint8]:
        """What the stage retains after each action, as `schedule.stage_retained` has it: the index in `Retain`."""
        found = np.full(len(self.kind), _RETAINED[Retain.GRAPH])
        found[(self.kind == _code(Kind.F)) & self._also(self.kind == _code(Kind.R))] = _RETAINED[Retain.INPUT]
        found[self.kind == _code(Kind.I)] = _RETAINED[Retain.WEIGHTS]
        done = np.isin(self.kind, [_code(Kind.B), _code(Kind.W)])
        found[done | ~self._also(self.returns)] = _RETAINED[Retain.NOTHING]
        return found

    def with_recomputation(self, mode: str) -> Self:
        """As `schedule.with_recomputation` of an order without recomputations, with one of ``RECOMPUTE``."""
        assert mode in RECOMPUTE, mode
        if mode == "never":
            return self
        again = self.returns.copy()
        if mode == "except_last":
            by_stage = np.argsort(self.stage, kind="stable")
            again[by_stage[1:][np.diff(self.pieces[by_stage]) == 0]] = False  # directly after the forward
        at = np.flatnonzero(again)
        kind = np.insert(self.kind, at, _code(Kind.R))
        stage, micro_batch = (np.insert(column, at, column[at]) for column in (self.stage, self.micro_batch))
        return type(self)(kind, stage, micro_batch, self.ends + np.searchsorted(at, self.ends))

    def _also(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """For each action, whether one of the `chosen` has the same stage and micro-batch."""
        there = np.zeros(self.stages * self.micro_batches, np.bool_)
        there[self.pieces[chosen]] = True
        return there[self.pieces]


@dataclass(frozen=True, eq=False)
class Times:
    """When the actions of `columns` ran, and the sums of gradients and the updates after them."""

    columns: Columns
    start_seconds: Seconds  # (A,)
    end_seconds: Seconds  # (A,)
    transfer_seconds: Seconds  # (P,): how long each device waited for tensors that had been computed
    sum_seconds: Seconds  # (P,): when each device, and all that share a tied weight with it, had done their actions
    summed_seconds: Seconds  # (P,): when, from then on, each device had the sums of its gradients
    update_seconds: Seconds  # (P,): how long its updates took

    @property
    def step_seconds(self) -> float:
        """Seconds from the beginning of the first action to the end of the last."""
        return float(self.end_seconds.max()) - float(self.start_seconds.min())

    @property
    def step_end_seconds(self) -> float:
        """When the last action or update of any device ended."""
        return float((self.summed_seconds + self.update_seconds).max())

    def breakdown(self, step_seconds: float) -> Breakdown:
        """As `breakdown.breakdown` of the same step."""
        columns, end = self.columns, float(self.end_seconds.max())
        seconds = self.end_seconds - self.start_seconds
        work = np.add.reduceat(seconds, columns.firsts)
        recompute = np.add.reduceat(np.where(columns.kind == _code(Kind.R), seconds, 0.0), columns.firsts)
        after = zip(self.sum_seconds.tolist(), self.summed_seconds.tolist(), self.update_seconds.tolist(), strict=True)
        devices = []
        for row, (done, summed, update) in enumerate(after):
            device = DeviceTime(float(work[row]), float(recompute[row]))
            device.add(EventKind.TRANSFER, float(self.transfer_seconds[row]), 0.0)
            for what, first, last in (
                (EventKind.TRANSFER, done, summed),
                (EventKind.UPDATE, summed, summed + update),
            ):
                within = max(0.0, min(last, end) - first)
                device.add(what, within, last - first - within)
            devices.append(device)
        return shares(devices, columns.micro_batches, self.step_seconds, step_seconds)


def simulate_columns(
    columns: Columns, stages: Sequence[StageCost], edges: Sequence[EdgeCost] = (), ties: Sequence[TieCost] = ()
) -> Times:
    """When each action runs, as `simulate` says it for a device per row and no slowdown.

    Every row has actions. `stages` has K costs, and `edges` K - 1 or none. Raises InputError for a deadlock.
    """
    assert len(stages) == columns.stages, "one cost per stage"
    assert not edges or len(edges) == len(stages) - 1, "one cost per edge"
    many, micro_batches = columns.stages, columns.micro_batches
    # when the output of each F was computed, then the gradients of each backward; then what needs no computation, and a
    # place for results that do not travel
    always, nowhere = 2 * many * micro_batches, 2 * many * micro_batches + 1
    sent = np.full(nowhere + 1, np.nan)
    sent[always] = 0.0
    forward, returns = columns.kind == _code(Kind.F), columns.returns
    back = columns.pieces + np.int32(many * micro_batches)
    gives = np.where(forward, columns.pieces, np.where(returns, back, np.int32(nowhere)))
    needs = np.full(len(gives), always, np.int32)
    np.copyto(needs, columns.pieces - np.int32(micro_batches), where=forward & (columns.stage > 0))
    np.copyto(needs, back + np.int32(micro_batches), where=returns & (columns.stage < many - 1))
    seconds = _cost_table(stages)[columns.retained, columns.kind, columns.stage]
    link_seconds, apart = _links(columns.row_of_stage, edges)
    # a link is numbered by what its first micro-batch is in `sent`, divided by M
    free = np.zeros(len(columns.ends))  # when each device is free
    link_free = np.zeros(len(link_seconds))
    transfers = np.zeros(len(columns.ends))
    starts = np.zeros(len(gives))
    at = columns.firsts.copy()
    rows = np.flatnonzero(at < columns.ends)  # those that are not done
    ends = columns.ends
    while rows.size:
        here = at[rows]
        needed = needs[here]
        there = sent[needed]
        ready = np.flatnonzero(there == there)  # not NaN
        if ready.size < rows.size:
            if not ready.size:
                raise InputError(f"schedule: deadlock in {rows.size} of {len(ends)} rows")
            doing, here, needed, there = rows[ready], here[ready], needed[ready], there[ready]
        else:
            doing = rows
        was_free = free[doing]
        arrival = there
        if edges:
            link = needed // micro_batches
            arrival = np.maximum(there, link_free[link]) + link_seconds[link]
            link_free[link] = arrival * apart[link]
        start = np.maximum(was_free, arrival)
        if edges:
            transfers[doing] += start - np.maximum(was_free, there)
        end = start + seconds[here]
        starts[here] = start
        free[doing] = end
        sent[gives[here]] = end
        here += 1
        at[doing] = here
        if (here == ends[doing]).any():
            rows = np.flatnonzero(at < ends)
    return Times(columns, starts, starts + seconds, transfers, *_after(columns, starts + seconds, stages, ties))


def _after(
    columns: Columns, end_seconds: Seconds, stages: Sequence[StageCost], ties: Sequence[TieCost]
) -> tuple[Seconds, Seconds, Seconds]:
    """The last three of `Times`."""
    done = end_seconds[columns.ends - 1]
    added_up, updates = np.zeros((2, len(done)))
    finished = np.zeros(len(stages))
    np.maximum.at(finished, columns.stage, end_seconds)
    for stage in np.argsort(finished, kind="stable"):
        row = columns.row_of_stage[stage]
        added_up[row] = max(added_up[row], finished[stage]) + stages[stage].sum_seconds
        updates[row] += stages[stage].update_seconds
    begin, summed = done.copy(), added_up.copy()
    for tie in ties:
        having = np.unique(columns.row_of_stage[list(tie.stages)])
        if len(having) > 1:
            begin[having] = np.maximum(begin[having], done[having].max())
            summed[having] = np.maximum(summed[having], added_up[having].max() + tie.seconds)
    return begin, np.maximum(begin, summed), updates


def _cost_table(stages: Sequence[StageCost]) -> Seconds:
    """The seconds of an action, by what its stage retains, its kind and its stage."""
    found = np.zeros((len(Retain), _KINDS, len(stages)))
    for retain, kind in product(Retain, Kind):
        found[_RETAINED[retain], _code(kind)] = [stage.seconds(kind, retain) for stage in stages]
    return found


def _links(row_of_stage: NDArray[np.intp], edges: Sequence[EdgeCost]) -> tuple[Seconds, NDArray[np.bool_]]:
    """For each link, its seconds and whether it joins two rows: from each stage to the next one, then from each stage
    to the one before, and last one for what needs no link."""
    joins = np.diff(row_of_stage) != 0
    apart = np.concatenate([joins, [False, False], joins, [False]])
    forward, backward = ([getattr(edge, way) for edge in edges] for way in ("forward_seconds", "backward_seconds"))
    seconds = np.array([*forward, 0.0, 0.0, *backward, 0.0]) if edges else np.zeros(len(apart))
    return np.where(apart, seconds, 0.0), apart


def peak_bytes_of_rows(columns: Columns, sizes: Sequence[Held]) -> tuple[int, ...]:
    """For each row, the most bytes that its stages hold together for micro-batches in flight. `sizes`: for each stage,
    the bytes of a micro-batch in each way to hold it; for example `Held(graph=1, weights=1)`, to count micro-batches.
    """
    return tuple(_peak(begun + ended, ended) for begun, ended, _ in _changes(columns, sizes))


def peak_bytes_of_stages(columns: Columns, sizes: Sequence[Held]) -> tuple[int, ...]:
    """For each stage, the most bytes held for micro-batches in flight: `held.peak_bytes` of one size."""
    found = [0] * len(sizes)
    for begun, ended, stages in _changes(columns, sizes):
        for stage in np.unique(stages):
            own = stages == stage
            found[stage] = _peak(begun[own] + ended[own], ended[own])
    return tuple(found)


def _peak(changes: NDArray[np.int64], ended: NDArray[np.int64]) -> int:
    return int((np.cumsum(changes) - ended).max(initial=0))


def _changes(columns: Columns, sizes: Sequence[Held]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], Whole]]:
    """For each row, by how many bytes the beginning and the end of each action change what is held; and its stage."""
    begins, ends = np.zeros((2, len(Retain), _KINDS, len(sizes)), np.int64)
    for stage, size in enumerate(sizes):
        for (kind, retain), (begin, end) in changed_bytes(size).items():
            begins[_RETAINED[retain], _code(kind), stage] = begin
            ends[_RETAINED[retain], _code(kind), stage] = end
    for first, end in zip(columns.firsts, columns.ends, strict=True):
        row = columns.retained[first:end], columns.kind[first:end], columns.stage[first:end]
        yield begins[row], ends[row], columns.stage[first:end]
