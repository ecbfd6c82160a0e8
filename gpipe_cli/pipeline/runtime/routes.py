"""Which stage sends which tensors to which: what the next layer gets to the next stage, and a long skip straight to the
stage that takes it up again.

A stage's inputs are what the layer before its first one returns, followed by the skips that it takes up, in the order
of their stashes; its outputs are what its last layer returns, followed by the skips that it keeps for later stages.
Gradients take the same routes back.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gpipe_cli.pipeline.runtime.boundary import Boundary, OptionalTensors
from gpipe_cli.schedule.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Route:
    """The tensors that stage `sender` hands to the later stage `receiver`."""

    sender: int
    receiver: int
    outputs: tuple[int, ...]  # their positions among the sender's outputs
    inputs: tuple[int, ...]  # their positions among the receiver's inputs
    tensors: Boundary


@dataclass
class Boundaries:
    """All tensors that cross from each stage to the next, in training and evaluation, skips to later stages among them;
    images have `memory_format`."""

    training: Sequence[Boundary]
    evaluation: Sequence[Boundary]
    memory_format: torch.memory_format = torch.contiguous_format

    def __post_init__(self) -> None:
        self.change(self.training, self.evaluation)

    def change(self, training: Sequence[Boundary], evaluation: Sequence[Boundary]) -> None:
        """From the next step on, other shapes cross."""
        self.training, self.evaluation = training, evaluation
        self._routes = Routes(routes(evaluation)), Routes(routes(training))

    def routes(self, schedule: Schedule) -> "Routes":
        return self._routes[schedule.trains]


class Routes:
    """Shares out what a stage sends after an action, and puts together what it receives for one."""

    def __init__(self, of: Sequence[Route] | None = None) -> None:
        """None: neighbours exchange everything."""
        self._of = of
        self._ahead: dict[int, list[Route]] = {}
        self._back: dict[int, list[Route]] = {}
        for route in of or ():
            self._ahead.setdefault(route.sender, []).append(route)
            self._back.setdefault(route.receiver, []).append(route)

    def peers(self, stage: int, *, ahead: bool) -> list[tuple[int, Route | None]]:
        """The later stages that `stage` sends outputs to, or the earlier ones that send to it, with the routes."""
        if self._of is None:
            return [(stage + 1 if ahead else stage - 1, None)]
        if ahead:
            return [(route.receiver, route) for route in self._ahead.get(stage, ())]
        return [(route.sender, route) for route in self._back.get(stage, ())]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of stages of which the first sends outputs to the second."""
        return tuple((route.sender, route.receiver) for route in self._of or ())

    def tensors(self, sender: int, receiver: int) -> Boundary:
        """What stage `sender` hands to stage `receiver` after a forward."""
        return next(route.tensors for route in self._ahead[sender] if route.receiver == receiver)

    def sent(self, action: Action, tensors: OptionalTensors) -> Iterator[tuple[int, OptionalTensors]]:
        """The stages that get results of an action, each with what it gets."""
        ahead = action.kind is Kind.F
        for peer, route in self.peers(action.stage, ahead=ahead):
            if route is None:
                yield peer, tensors
            else:
                yield peer, tuple(tensors[at] for at in (route.outputs if ahead else route.inputs))

    def received(self, action: Action, receive: Callable[[int], OptionalTensors]) -> OptionalTensors:
        """What an action needs; `receive` gives what a stage has sent for it."""
        ahead = action.kind is not Kind.F
        received: dict[int, torch.Tensor | None] = {}
        for peer, route in self.peers(action.stage, ahead=ahead):
            came = receive(peer)
            if route is None:
                return came
            received |= zip(route.outputs if ahead else route.inputs, came, strict=True)
        return tuple(received[at] for at in sorted(received))


def inputs_of(boundaries: Sequence[Boundary], stage: int) -> Boundary:
    """The inputs of a stage that come from other stages. `boundaries[k]` has all tensors that cross the cut between
    stages k and k + 1: the output of the layer before, and the skips that were stashed before and are popped behind."""
    if stage == 0:
        return ()
    before, behind = boundaries[stage - 1], _skips(boundaries, stage)
    return tuple(tensor for tensor in before if not tensor.skip or tensor.skip not in behind)


def outputs_of(boundaries: Sequence[Boundary], stage: int) -> Boundary:
    """The outputs of a stage for other stages; `boundaries` as in `inputs_of`."""
    if stage == len(boundaries):
        return ()
    before = _skips(boundaries, stage - 1) if stage else frozenset()
    return tuple(tensor for tensor in boundaries[stage] if not tensor.skip or tensor.skip not in before)


def routes(boundaries: Sequence[Boundary]) -> tuple[Route, ...]:
    """The routes of a pipeline, by sender, then receiver; `boundaries` as in `inputs_of`."""
    stages = range(len(boundaries) + 1)
    receivers = {tensor.skip: k for k in stages for tensor in inputs_of(boundaries, k) if tensor.skip}
    senders = {tensor.skip: k for k in stages for tensor in outputs_of(boundaries, k) if tensor.skip}
    made = []
    for sender in stages[:-1]:
        outputs = outputs_of(boundaries, sender)
        to = [receivers[tensor.skip] if tensor.skip else sender + 1 for tensor in outputs]
        for receiver in sorted({sender + 1, *to}):
            inputs = inputs_of(boundaries, receiver)
            came = [senders[tensor.skip] if tensor.skip else receiver - 1 for tensor in inputs]
            sent = tuple(at for at, one in enumerate(to) if one == receiver)
            taken = tuple(at for at, one in enumerate(came) if one == sender)
            made.append(Route(sender, receiver, sent, taken, tuple(outputs[at] for at in sent)))
    return tuple(made)


def forward_bytes(boundaries: Sequence[Boundary], samples: int, lengths: Sequence[int] = ()) -> tuple[int, int]:
    """Bytes that all stages together send in the forwards of a micro-batch, and what they would send if each skip went
    through all stages between, as a tensor of a tuple; `boundaries` as in `inputs_of`."""
    straight = [tensor for route in routes(boundaries) for tensor in route.tensors]
    through = [tensor for boundary in boundaries for tensor in boundary]
    return sum(one.bytes(samples, lengths) for one in straight), sum(one.bytes(samples, lengths) for one in through)


def _skips(boundaries: Sequence[Boundary], cut: int) -> frozenset[str]:
    """The names of the skips that cross the cut behind stage `cut`."""
    if cut >= len(boundaries):
        return frozenset()
    return frozenset(tensor.skip for tensor in boundaries[cut] if tensor.skip)
