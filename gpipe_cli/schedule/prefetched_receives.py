"""When a process posts each receive, and into which receive buffer: derived from the schedule before it runs.

On a GPU a posted receive is a kernel that runs until its tensor arrives, and a send is a kernel that runs until its
tensor is received. Some launches wait until the device is idle: when a kernel is loaded for the first time, or when the
allocator frees memory. If the transfers in flight then depend on an action that this or another process has not
launched yet, there is a deadlock.

So all processes follow the same order of all actions, in which each action comes after those that it needs
(`linearize`): a process posts the receive of a tensor after all of its own actions that precede the action which
computes the tensor. Then everything waits for something earlier in that order, so there is no cycle. This costs
nothing, as a process launches its actions long before the GPU gets to them.

On a CPU a launched action runs at once and a posted receive costs nothing: it is posted as soon as its buffer is free.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpipe_cli.schedule.dependencies import linearize_retained
from gpipe_cli.schedule.schedule import RETURNS, Action, Kind, Retain, Schedule

_Edge = tuple[Kind, int, int]  # as in `runtime/link.py`


@dataclass(frozen=True, slots=True)
class PrefetchedReceive:
    """The receive of what `action` needs from another process, posted before the action begins."""

    action: Action
    sender: int  # the stage that sends it
    after: int  # posted when the process has launched this many of its actions
    buffer: int  # index among the receive buffers of the stage for this direction
    freed: int  # the buffer is free when this many of the process's actions have ended; 0: not used before in this step


@lru_cache(maxsize=16)  # mini-batches of text may differ in M, and each M has a schedule of its own
def prefetched_receives(
    schedule: Schedule,
    process_of_stage: tuple[int, ...],
    process: int,
    pairs: tuple[tuple[int, int], ...],
    *,
    early: bool,
) -> tuple[PrefetchedReceive, ...]:
    """All receives of `process`, in the order in which it posts them: in the common order of all actions or, if
    `early`, as soon as buffers are free. `process_of_stage` has the process of each stage; `pairs` are those stages of
    which the first sends outputs to the second: all neighbours, and the two ends of a skip.

    A buffer is free again when its stage retains nothing of its micro-batch, nor do the stages that get something from
    it in this process: a layer may pass its input on in the same memory. Raises ScheduleError if the schedule
    deadlocks.
    """
    receivers = _receivers(schedule, process_of_stage, process, pairs)
    # edge -> its free buffers, each with the number of launches after which it became free
    free: dict[_Edge, deque[tuple[int, int]]] = defaultdict(deque)
    # micro-batch -> the buffer of each receiving action and its edge
    held: dict[int, dict[tuple[Action, _Edge], int]] = defaultdict(dict)
    left: set[tuple[int, int]] = set()  # (stage, micro-batch) pairs of which nothing is retained any more
    made: Counter[_Edge] = Counter()  # number of buffers of each edge
    posted: Counter[_Edge] = Counter()  # after how many launches the last receive of each edge is posted
    receives = []
    launched = 0
    for action, retain in linearize_retained(schedule, process_of_stage):
        if process_of_stage[action.stage] == process:
            launched += 1
            if retain is Retain.NOTHING:
                left.add((action.stage, action.micro_batch))
                in_use = held[action.micro_batch]
                ended = [key for key in in_use if left.issuperset(_reached(key[0], process_of_stage, pairs))]
                for receiver, edge in ended:
                    free[edge].append((launched, in_use.pop((receiver, edge))))
        for receiver in receivers.get(action, ()):
            edge = (receiver.kind.direction, action.stage, receiver.stage)
            reused = bool(free[edge])
            since, buffer = free[edge].popleft() if reused else (0, made[edge])
            held[receiver.micro_batch][receiver, edge] = buffer
            made[edge] += not reused
            # Receives over an edge keep their order.
            posted[edge] = max(posted[edge], since) if early else launched
            receives.append(PrefetchedReceive(receiver, action.stage, posted[edge], buffer, since))
    return tuple(sorted(receives, key=lambda receive: receive.after))


def _receivers(
    schedule: Schedule, process_of_stage: Sequence[int], process: int, pairs: Sequence[tuple[int, int]]
) -> dict[Action, list[Action]]:
    """For actions of other processes: the actions of `process` that need their results."""
    receivers: dict[Action, list[Action]] = defaultdict(list)
    for sender, receiver in pairs:
        if (process_of_stage[sender] == process) is (process_of_stage[receiver] == process):
            continue
        if process_of_stage[receiver] == process:
            for action in schedule.stages[receiver]:
                if action.kind is Kind.F:
                    receivers[action._replace(stage=sender)].append(action)
        elif process_of_stage[sender] == process:
            backward = {a.micro_batch: a for a in schedule.stages[receiver] if a.kind in RETURNS}
            for action in schedule.stages[sender]:
                if action.kind in RETURNS:
                    receivers[backward[action.micro_batch]].append(action)
    return receivers


def _reached(
    receiver: Action, process_of_stage: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> set[tuple[int, int]]:
    """(stage, micro-batch) for the receiving stage and for those of its process that get something from it."""
    ahead = receiver.kind is Kind.F
    process = process_of_stage[receiver.stage]
    reached = {receiver.stage}
    for sender, target in sorted(pairs) if ahead else sorted(((b, a) for a, b in pairs), reverse=True):
        if sender in reached and process_of_stage[target] == process:
            reached.add(target)
    return {(stage, receiver.micro_batch) for stage in reached}
