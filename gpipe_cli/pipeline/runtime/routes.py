"""Which stage sends which tensors to which: a layer's outputs to the next stage, and a long skip directly to the stage
that pops it.

A stage's inputs are the outputs of the last layer before it, followed by the skips that it pops, in the order of their
stashes; its outputs are those of its last layer, followed by the skips that it stashes for later stages. Gradients take
the same routes back.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gpipe_cli.pipeline.runtime.boundary import Boundary, OptionalTensors
from gpipe_cli.schedule.schedule import Action, Kind, Schedule


class Route(NamedTuple):
    """The tensors that stage `sender` sends to the later stage `receiver`."""

    sender: int
    receiver: int
    outputs: tuple[int, ...]  # the tensors' positions among the sender's outputs
    inputs: tuple[int, ...]  # the tensors' positions among the receiver's inputs
    tensors: Boundary


@dataclass
class Boundaries:
    """All tensors that cross from each stage to the next, including skips to later stages, in training and evaluation;
    images have `memory_format`. `layer_names`: the layers of each stage, for messages."""

    training: Sequence[Boundary]
    evaluation: Sequence[Boundary]
    memory_format: torch.memory_format = torch.contiguous_format
    layer_names: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        self.change(self.training, self.evaluation)

    def change(self, training: Sequence[Boundary], evaluation: Sequence[Boundary]) -> None:
        """Use these boundaries, with other shapes, from the next step on."""
        self.training, self.evaluation = training, evaluation
        self._routes = Routes(routes(evaluation)), Routes(routes(training))

    def routes(self, schedule: Schedule) -> "Routes":
        return self._routes[schedule.trains]


class Routes:
    """Distributes what a stage sends after an action, and collects what it receives for an action."""

    def __init__(self, routes: Sequence[Route] = ()) -> None:
        self._routes = routes
        # (stage, whether forward) -> the later stages that it sends outputs to, or the earlier ones that send to it,
        # each with the positions of these tensors among its outputs, or its inputs
        self._peers: dict[tuple[int, bool], list[tuple[int, tuple[int, ...]]]] = {}
        for route in routes:
            self._peers.setdefault((route.sender, True), []).append((route.receiver, route.outputs))
            self._peers.setdefault((route.receiver, False), []).append((route.sender, route.inputs))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs (sender, receiver) of stages, as outputs are sent."""
        return tuple((route.sender, route.receiver) for route in self._routes)

    def tensors(self, sender: int, receiver: int) -> Boundary:
        """The tensors that stage `sender` sends to stage `receiver` after a forward."""
        return next(route.tensors for route in self._routes if (route.sender, route.receiver) == (sender, receiver))

    def outgoing(self, action: Action, tensors: OptionalTensors) -> Iterator[tuple[int, OptionalTensors]]:
        """The stages that get results of an action, each with the tensors that it gets."""
        for peer, places in self._peers.get((action.stage, action.kind is Kind.F), ()):
            yield peer, tuple(tensors[place] for place in places)

    def incoming(self, action: Action, receive: Callable[[int], OptionalTensors]) -> OptionalTensors:
        """The tensors that an action needs; `receive` gives those that a stage has sent for it."""
        incoming: dict[int, torch.Tensor | None] = {}
        for peer, places in self._peers.get((action.stage, action.kind is not Kind.F), ()):
            incoming |= zip(places, receive(peer), strict=True)
        return tuple(incoming[place] for place in sorted(incoming))


def inputs_of(boundaries: Sequence[Boundary], stage: int) -> Boundary:
    """The inputs of a stage that come from other stages. `boundaries[k]` has all tensors that cross the cut between
    stages k and k + 1: the output of the layer before, and the skips that were stashed before and are popped behind."""
    if stage == 0:
        return ()
    tensors_before = boundaries[stage - 1]
    skips_behind = _skips(boundaries, stage)
    return tuple(tensor for tensor in tensors_before if not tensor.skip or tensor.skip not in skips_behind)


def outputs_of(boundaries: Sequence[Boundary], stage: int) -> Boundary:
    """The outputs of a stage for other stages; `boundaries` as in `inputs_of`."""
    if stage == len(boundaries):
        return ()
    skips_before = _skips(boundaries, stage - 1) if stage else frozenset()
    return tuple(tensor for tensor in boundaries[stage] if not tensor.skip or tensor.skip not in skips_before)


def routes(boundaries: Sequence[Boundary]) -> tuple[Route, ...]:
    """The routes of a pipeline, by sender, then receiver; `boundaries` as in `inputs_of`."""
    stages = range(len(boundaries) + 1)
    receivers = {tensor.skip: k for k in stages for tensor in inputs_of(boundaries, k) if tensor.skip}
    senders = {tensor.skip: k for k in stages for tensor in outputs_of(boundaries, k) if tensor.skip}
    found_routes = []
    for sender in stages[:-1]:
        outputs = outputs_of(boundaries, sender)
        output_receivers = [receivers[tensor.skip] if tensor.skip else sender + 1 for tensor in outputs]
        for receiver in sorted({sender + 1, *output_receivers}):
            inputs = inputs_of(boundaries, receiver)
            input_senders = [senders[tensor.skip] if tensor.skip else receiver - 1 for tensor in inputs]
            outgoing = tuple(place for place, stage in enumerate(output_receivers) if stage == receiver)
            input_places = tuple(place for place, stage in enumerate(input_senders) if stage == sender)
            found_routes.append(
                Route(sender, receiver, outgoing, input_places, tuple(outputs[place] for place in outgoing))
            )
    return tuple(found_routes)


def forward_bytes(boundaries: Sequence[Boundary], samples: int, lengths: Sequence[int] = ()) -> tuple[int, int]:
    """The bytes that all stages together send in the forwards of a micro-batch, and what they would send if each skip
    went through all stages between, as a tensor of a tuple; `boundaries` as in `inputs_of`."""
    routed = [tensor for route in routes(boundaries) for tensor in route.tensors]
    crossing = [tensor for boundary in boundaries for tensor in boundary]
    return sum(t.bytes(samples, lengths) for t in routed), sum(t.bytes(samples, lengths) for t in crossing)


def _skips(boundaries: Sequence[Boundary], cut: int) -> frozenset[str]:
    """The names of the skips that cross the cut behind stage `cut`."""
    if cut >= len(boundaries):
        return frozenset()
    return frozenset(tensor.skip for tensor in boundaries[cut] if tensor.skip)
