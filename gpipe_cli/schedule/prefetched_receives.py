"""When a process posts each receive, and into which receive buffer: derived from the schedule before it runs.

On a GPU a posted receive is a kernel that runs until its tensor arrives, and a send is a kernel that runs until its
tensor is received. Some launches wait until the device is idle: when a kernel is loaded for the first time, or when the
allocator frees memory. If the transfers in flight then depend on an action that this or another process has not
launched yet, there is a deadlock.

So all processes follow the same order of all actions, in which each action comes after those that it needs
(`topological_order`): a process posts the receive of a tensor after all of its actions that precede the action which
computes the tensor. Then everything waits for something earlier in that order, without a cycle. This costs nothing, as
a process launches its actions long before the GPU reaches them.

On a CPU a launched action runs immediately and a receive costs nothing: it is posted as soon as its buffer is free.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpipe_cli.schedule.dependencies import order_with_saved_state
from gpipe_cli.schedule.schedule import SENDS_GRADIENT, Action, Kind, Retain, Schedule

_Edge = tuple[Kind, int, int]  # as in `runtime/link.py`


@dataclass(frozen=True, slots=True)
class PrefetchedReceive:
    """The receive of what `action` needs from another process, posted before the action begins."""

    action: Action
    sender: int  # the stage that sends it
    after: int  # posted when the process has launched this many of its actions
    buffer: int  # index among the receive buffers of the stage for this direction
    freed: int  # the buffer is free when this many of the process's actions have ended; 0: not used before in this step


@lru_cache(maxsize=16)  # mini-batches of text may differ in M, and each M has its own schedule
def prefetched_receives(
    schedule: Schedule,
    rank_of_stage: tuple[int, ...],
    rank: int,
    pairs: tuple[tuple[int, int], ...],
    *,
    post_eagerly: bool,
) -> tuple[PrefetchedReceive, ...]:
    """All receives of `rank`, in the order in which it posts them: in the common order of all actions or, if
    `post_eagerly`, as soon as buffers are free. `rank_of_stage` has the process of each stage; `pairs` are those stages
    of which the first sends outputs to the second: all neighbours, and the two ends of a skip.

    A buffer is free again when its stage, and the stages of this process that get something from it, retain nothing of
    its micro-batch: a layer may pass its input on in the same memory. Raises ScheduleError if the schedule deadlocks.
    """
    receivers = _receivers(schedule, rank_of_stage, rank, pairs)
    # edge -> its free buffers, each with the number of launches after which it became free
    free: dict[_Edge, deque[tuple[int, int]]] = defaultdict(deque)
    # micro-batch -> the buffer of each receiving action and its edge
    buffers_in_use: dict[int, dict[tuple[Action, _Edge], int]] = defaultdict(dict)
    finished: set[tuple[int, int]] = set()  # (stage, micro-batch) pairs of which nothing is retained any more
    buffer_counts: Counter[_Edge] = Counter()  # number of buffers of each edge
    posted: Counter[_Edge] = Counter()  # after how many launches the last receive of each edge is posted
    receives = []
    launched = 0
    for action, retain in order_with_saved_state(schedule, rank_of_stage):
        if rank_of_stage[action.stage] == rank:
            launched += 1
            if retain is Retain.NOTHING:
                finished.add((action.stage, action.micro_batch))
                in_use = buffers_in_use[action.micro_batch]
                ended = [key for key in in_use if finished.issuperset(_readers_of(key[0], rank_of_stage, pairs))]
                for receiver, edge in ended:
                    free[edge].append((launched, in_use.pop((receiver, edge))))
        for receiver in receivers.get(action, ()):
            edge = (receiver.kind.direction, action.stage, receiver.stage)
            reused = bool(free[edge])
            since, buffer = free[edge].popleft() if reused else (0, buffer_counts[edge])
            buffers_in_use[receiver.micro_batch][receiver, edge] = buffer
            buffer_counts[edge] += not reused
            # Receives over an edge keep their order.
            posted[edge] = max(posted[edge], since) if post_eagerly else launched
            receives.append(PrefetchedReceive(receiver, action.stage, posted[edge], buffer, since))
    return tuple(sorted(receives, key=lambda receive: receive.after))


def _receivers(
    schedule: Schedule, rank_of_stage: Sequence[int], rank: int, pairs: Sequence[tuple[int, int]]
) -> dict[Action, list[Action]]:
    """For actions of other processes: the actions of `rank` that need their results."""
    receivers: dict[Action, list[Action]] = defaultdict(list)
    for sender, receiver in pairs:
        if (rank_of_stage[sender] == rank) is (rank_of_stage[receiver] == rank):
            continue
        if rank_of_stage[receiver] == rank:
            for action in schedule.stages[receiver]:
                if action.kind is Kind.F:
                    receivers[action._replace(stage=sender)].append(action)
        elif rank_of_stage[sender] == rank:
            backward = {a.micro_batch: a for a in schedule.stages[receiver] if a.kind in SENDS_GRADIENT}
            for action in schedule.stages[sender]:
                if action.kind in SENDS_GRADIENT:
                    receivers[backward[action.micro_batch]].append(action)
    return receivers


def _readers_of(
    receiver: Action, rank_of_stage: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> set[tuple[int, int]]:
    """(stage, micro-batch) for the receiving stage and for the stages of its process that get something from it."""
    forward = receiver.kind is Kind.F
    rank = rank_of_stage[receiver.stage]
    readers = {receiver.stage}
    for sender, target in sorted(pairs) if forward else sorted(((b, a) for a, b in pairs), reverse=True):
        if sender in readers and rank_of_stage[target] == rank:
            readers.add(target)
    return {(stage, receiver.micro_batch) for stage in readers}
