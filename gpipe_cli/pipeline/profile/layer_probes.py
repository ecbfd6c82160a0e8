"""Why a layer cannot be pipelined: every layer is watched while one micro-batch is run, and run again (paper section
2.3).

A stage keeps its input and runs its layers again. That gives the same bits only if a layer leaves its input alone,
draws from torch's generator alone, and remembers nothing between calls. Running variants shows where bits differ; this
shows why. It also finds what a single step does not show: statistics in buffers that a recomputation counts twice.
"""

import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gpipe_cli.pipeline.profile.reads import Reads
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_tuple, same_bits
from gpipe_cli.pipeline.runtime.initial_weights import NO_VALUES
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.saved_activations import storage_of
from gpipe_cli.pipeline.runtime.stage import Stage

FindingKind = Literal["in_place", "random", "state", "foreign"]


@dataclass(frozen=True)
class Finding:
    """Why a layer gives other results in a pipeline than in one piece."""

    kind: FindingKind
    layer: str
    text: str


@dataclass
class Probed:
    """What was found while layers ran."""

    first: dict[str, Finding] = field(default_factory=dict)  # layer name -> the first finding
    draws: bool = False  # some draw random numbers from torch's generator, as for dropout

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self.first.values())

    def found(self, kind: FindingKind, layer: str, text: str) -> None:
        self.first.setdefault(layer, Finding(kind, layer, text))


@contextmanager
def probing(stages: Iterable[Stage]) -> Iterator[Probed]:
    """Inside, the layers of `stages` are watched while they are run, once or twice on the same micro-batch; afterwards
    buffers, gradients, what modules remember as attributes, and generators are as before."""
    probed = Probed()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(_gpus(stage.device for stage in stages)))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state(legacy=True))
        for stage in stages:
            stack.enter_context(_put_back(stage.module))
            seen = _Seen(probed, stage)
            stack.enter_context(seen.running)
            for name, layer in stage.module.named_children():
                begins = layer.register_forward_pre_hook(partial(seen.begins, name), prepend=True)
                ended = layer.register_forward_hook(partial(seen.ended, name))
                stack.callback(begins.remove)
                stack.callback(ended.remove)
        try:
            yield probed
        except ChangedInputError as error:
            probed.found("in_place", error.layer, str(error))
            raise


class _Seen:
    """The layers of one stage: each is compared with itself before it was run, and with its first run."""

    def __init__(self, probed: Probed, stage: Stage) -> None:
        self._probed, self._stage = probed, stage
        self.running = ExitStack()  # contexts that are active while a layer runs
        self._reads: Mapping[int, torch.Tensor] = {}  # by storage, what the running layer has read
        # storages of the stage's tensors, and of what layers were given
        self._known = {storage_of(tensor) for tensor in (*stage.module.parameters(), *stage.module.buffers())}
        self._before: tuple[Any, ...] = ()  # the state when the running layer began
        self._outputs: dict[str, Tensors] = {}  # layer name -> the outputs of its first run
        self._depth = 0  # a layer may run another, which it holds without torch's knowledge
        self._differs = False  # a layer has given other values: those behind it are given other values

    def begins(self, name: str, layer: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        held = {key: (tensor, tensor.detach().clone(), tensor._version) for key, tensor in _tensors(layer).items()}
        given = [(tensor, tensor.detach().clone()) for tensor in as_tuple(inputs[0])]
        self._known.update(storage_of(tensor) for tensor, _ in given)
        self._before = held, given, self._generators(), _other_generators()
        if not self._stage.compiled:  # torch refuses to run compiled code under a mode
            self._reads = self.running.enter_context(Reads()).tensors

    def ended(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self.running.close()
        held, given, generators, others = self._before
        self._before = ()

        def found(kind: FindingKind, what: str) -> None:
            self._probed.found(kind, name, f"layer {name} {what}")

        if (fault := self._foreign()) is not None:
            found("foreign", f"reads a tensor {fault}")
        if not all(same_bits(*pair) for pair in given):
            self._probed.found("in_place", name, str(ChangedInputError(name)))
            for tensor, value in given:  # it is what the layer before gave
                _write_back(tensor, value)
        if sources := [source for source, state in _other_generators().items() if state != others[source]]:
            found(
                "random",
                f"draws from {' and '.join(sources)}, which no stage can repeat: a recomputation and another cut get "
                "other numbers; use torch's functions",
            )
        self._probed.draws |= not torch.equal(self._generators(), generators)
        now = _tensors(layer)
        changed = [
            key
            for key, (tensor, value, version) in held.items()
            # spectral norm that has converged writes what stood there before, until the weights change; weights
            # themselves are written to by torch, to bring them together in memory
            if (tensor._version != version and not isinstance(tensor, nn.Parameter))
            or (key in now and not same_bits(now[key], value))
        ]  # fmt: skip
        for tensor, value, _ in held.values():
            _write_back(tensor, value)
        if changed:
            found(
                "state",
                f"changes its own {', '.join(changed[:3])} when it is run: micro-batches and recomputations each "
                "count; leave that out, or use nn.BatchNorm, whose statistics are deferred",
            )
        outputs, first = as_tuple(output), self._outputs.pop(name, None)
        if first is None:
            self._outputs[name] = tuple(tensor.detach() for tensor in outputs)
        elif not self._differs and not all(map(same_bits, outputs, first)):
            self._differs = True
            found(
                "state",
                "gives other values when it is run again with the same seed: it keeps something between calls, asks "
                "whether gradients are recorded, or draws random numbers from a source that torch's seed does not "
                "rule; use torch's functions, and nothing that is remembered",
            )

    def _foreign(self) -> str | None:
        """What is wrong with a tensor that a layer has read, in words."""
        for storage, tensor in self._reads.items():
            if tensor.is_meta:
                return f"{tuple(tensor.shape)} that {NO_VALUES}"
            if storage not in self._known and tensor.requires_grad and tensor.is_leaf:
                return (
                    f"{tuple(tensor.shape)} that its stage does not train, but that of another layer; keep the two "
                    "layers together by partition.balance"
                )
        return None

    def _generators(self) -> torch.Tensor:
        """The states of torch's own generators: a layer on a GPU may draw on the CPU, too."""
        return torch.cat([torch.get_rng_state(), *map(torch.cuda.get_rng_state, _gpus([self._stage.device]))])


def _gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Inside, the module may be run, and its gradients computed."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # attributes are often replaced rather than changed, buffers too
    attributes = [(own, dict(own)) for inner in module.modules() for own in (vars(inner), inner._buffers)]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for own, before in attributes:
            own.clear()
            own.update(before)
        for buffer, value in buffers:
            _write_back(buffer, value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _write_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Without autograd, which may need the tensor for a backward. One that has not changed may not be writable."""
    if not same_bits(tensor, value):
        tensor.data.copy_(value)


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _other_generators() -> dict[str, bytes]:
    """The states of the generators that torch does not control and no stage seeds."""
    states = {"Python's random module": random.getstate(), "numpy.random": np.random.get_state(legacy=True)}
    return {source: pickle.dumps(state) for source, state in states.items()}
