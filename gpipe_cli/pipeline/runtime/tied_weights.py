"""Weights that several layers use: an embedding whose matrix is also the softmax's, wherever the model is cut.

Every stage with such layers has the weight in memory once; each of its layers has a separate parameter there. So the
gradients of each use are summed over micro-batches in the order of the backwards, and at the end of a step the sums of
all uses are added in the order of the layers, at K = 1 as for any other cut (law 1). Every stage gets the same total,
and its optimizer takes the same step. With replicas, each use is summed over them first.
"""

import datetime
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gpipe_cli.pipeline.runtime.link import Links, await_first, wait_for
from gpipe_cli.pipeline.runtime.saved_activations import storage_id
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.transport import waiting_for_peers

Group = tuple[int, ...]  # ranks, in a pipeline, of the processes that have a tied weight, ascending


@dataclass(frozen=True)
class Tie:
    """A parameter that several layers use: for each of these layers, in order, its global names in the layer."""

    uses: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        """The name under which the parameter is trained, counted and saved, as torch's `named_parameters` has it."""
        return self.uses[0][0]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(names[0].partition(".")[0] for names in self.uses)


def find_ties(model: nn.Sequential) -> tuple[Tie, ...]:
    """The parameters of `model` that modules of several layers have. A module in several layers is a single use."""
    uses: dict[int, dict[str, list[str]]] = {}  # id of a parameter -> layer -> its names in the layer
    for path, module in model.named_modules():  # yields a module of several layers only once
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names_by_layer = uses.setdefault(id(parameter), {})
                names_by_layer.setdefault(path.partition(".")[0], []).append(f"{path}.{name}")
    return tuple(Tie(tuple(map(tuple, by_layer.values()))) for by_layer in uses.values() if len(by_layer) > 1)


def stages_of(ties: Sequence[Tie], layer_names: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """For each tied weight, the stage of each of its uses; `layer_names`: per stage, the names of its layers."""
    stage_of = {name: k for k, names in enumerate(layer_names) for name in names}
    return tuple(tuple(stage_of[layer] for layer in tie.layers) for tie in ties)


def canonical_names(ties: Sequence[Tie]) -> dict[str, str]:
    """For the names of all uses but the first: the name under which the parameter is trained and saved."""
    return {name: tie.name for tie in ties for names in tie.uses[1:] for name in names}


def set_parameter(model: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Make `parameter` the parameter of `model` under each of these global names."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._parameters[attribute] = parameter


def uses_in(tie: Tie, module: nn.Sequential) -> list[tuple[str, ...]]:
    """The uses of a tied weight in the layers of `module`, in order."""
    return [names for names, layer in zip(tie.uses, tie.layers, strict=True) if layer in module._modules]


def share_memory(module: nn.Sequential, ties: Sequence[Tie]) -> None:
    """Let each tied weight be in memory once: in `module`, a stage on its device, every use has its own parameter, with
    its own gradient, in the memory of the first use. The values of all uses must be equal."""
    for tie in ties:
        first, *others = uses_in(tie, module) or [()]
        for names in others:
            weight = module.get_parameter(first[0])
            set_parameter(module, names, nn.Parameter(weight.detach(), weight.requires_grad))


def trained_parameters(module: nn.Sequential, ties: Sequence[Tie]) -> dict[str, nn.Parameter]:
    """The parameters of a stage, in global order, by the names under which they are trained and saved: a tied weight
    once, also if its first use is in another stage."""
    renamed = canonical_names(ties)
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        parameters.setdefault(renamed.get(name, name), parameter)
    return parameters


class _Use(NamedTuple):
    """A use of a tied weight, in a stage of process `rank`."""

    rank: int
    parameter: nn.Parameter | None  # None: the stage is in another process
    device: torch.device  # the stage's; if the stage is in another process, a device of this process

    def gradient(self, like: nn.Parameter) -> torch.Tensor:
        """The gradient of a use in this process; for a use in another process, a receive buffer as large as `like`."""
        if self.parameter is None:
            return torch.empty_like(like)
        return torch.zeros_like(like) if self.parameter.grad is None else self.parameter.grad


@dataclass
class TiedWeights:
    """The tied weights of the `stages` (by index) of process `rank` of a pipeline.

    `stage_of_use[i][u]` is the stage of use u of `ties[i]`; `groups` has the process group of the processes with the
    same tied weights. Methods raise PeerLostError if another process is lost; limits of waits are those of `links`.
    """

    ties: Sequence[Tie]
    stage_of_use: Sequence[Sequence[int]]
    stages: Mapping[int, Stage]
    rank: int = 0
    rank_of_stage: Sequence[int] = ()
    groups: Mapping[Group, dist.ProcessGroup] = field(default_factory=dict)
    links: Links = field(default_factory=lambda: Links({}, 0.0, 0.0))  # by default no wait has a limit

    @cached_property
    def _trained(self) -> list[list[_Use]]:
        """The uses of each tied weight that this process trains."""
        trained = []
        for tie, stages in zip(self.ties, self.stage_of_use, strict=True):
            devices = [self.stages[k].device for k in stages if k in self.stages]
            uses = [
                _Use(self.rank_of_stage[k], stage.module.get_parameter(names[0]), stage.device)
                if (stage := self.stages.get(k)) is not None
                else _Use(self.rank_of_stage[k], None, devices[0])
                for k, names in zip(stages, tie.uses, strict=True)
                if devices
            ]
            if any(use.parameter is not None and use.parameter.requires_grad for use in uses):
                trained.append(uses)
        return trained

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters of this process that have the weights."""
        return [use.parameter for uses in self._trained for use in uses if use.parameter is not None]

    @property
    def stages_with_remote_uses(self) -> set[int]:
        """The stages of this process with a tied weight that another stage also has."""
        return {k for stages in self.stage_of_use if len({*stages}) > 1 for k in stages if k in self.stages}

    def connect(self, device: torch.device, seconds: float) -> None:
        """Send one message over each group, in the same order in all processes: backends connect at the first message,
        and could otherwise deadlock. Raises PeerLostError if connecting takes longer than `seconds`."""
        for members, group in sorted(self.groups.items()):
            for sender in members:
                token = torch.zeros(1, device=device)
                with self._waiting():
                    works = self._exchange(group, members, [(sender, token)])
                    self._wait(works, device)
                    await_first(works, device, seconds)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """After the last action of a step, and after sums over replicas: add the gradients of all uses. In every stage
        the first use gets the total, and other uses then have no gradient. Uses without a gradient count as zeros."""
        gradients = []
        exchanges: list[tuple[Sequence[dist.Work], torch.device]] = []
        with self._waiting():
            for uses in self._trained:
                like = next(use.parameter for use in uses if use.parameter is not None)
                use_gradients = [use.gradient(like) for use in uses]
                members = tuple(sorted({use.rank for use in uses}))
                if len(members) > 1:
                    tensors = [(use.rank, _flatten(grad)) for use, grad in zip(uses, use_gradients, strict=True)]
                    exchanges.append((self._exchange(self.groups[members], members, tensors), uses[0].device))
                gradients.append(use_gradients)
            for works, device in exchanges:
                self._wait(works, device)
        for uses, (total, *others) in zip(self._trained, gradients, strict=True):
            first_device = uses[0].device
            for use, gradient in zip(uses[1:], others, strict=True):
                total.add_(gradient if use.device == first_device else gradient.to(first_device, non_blocking=True))
            summed_storages: set[int] = set()  # storages of parameters that have the total
            for use in uses:
                if use.parameter is None:
                    continue
                memory = storage_id(use.parameter)
                use.parameter.grad = None
                if memory not in summed_storages:
                    needs_copy = bool(summed_storages) or use.device != first_device
                    use.parameter.grad = total.to(use.device, copy=True, non_blocking=True) if needs_copy else total
                summed_storages.add(memory)

    def _wait(self, works: Sequence[dist.Work], device: torch.device) -> None:
        wait_for(works, device, datetime.timedelta(seconds=self.links.timeout_seconds))

    def _exchange(
        self, group: dist.ProcessGroup, members: Group, tensors: Sequence[tuple[int, torch.Tensor]]
    ) -> list[dist.Work]:
        """Begin to send the tensors of this process to all `members`, and to receive theirs; each tensor is given with
        the number of the process that has it. All members list the tensors in the same order."""
        rank_of = dict(zip(members, dist.get_process_group_ranks(group), strict=True))
        receives = [
            dist.P2POp(dist.irecv, tensor, rank_of[owner], group) for owner, tensor in tensors if owner != self.rank
        ]
        sends = [
            dist.P2POp(dist.isend, tensor, rank_of[other], group)
            for owner, tensor in tensors
            for other in members
            if owner == self.rank != other
        ]
        return dist.batch_isend_irecv([*receives, *sends]) if receives or sends else []

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting_for_peers(self.links.waits(), "the gradient of a tied weight in another stage did not arrive")


def _flatten(gradient: torch.Tensor) -> torch.Tensor:
    """A dense tensor as a vector of its elements, in the order of their addresses."""
    return gradient.as_strided((gradient.numel(),), (1,))
