"""Finds why a layer cannot be pipelined, by watching all layers as a micro-batch runs twice (paper section 2.3).

A recomputation gives the same bits only if a layer leaves its input unchanged, draws random numbers only from torch's
generators, and keeps no state between calls. Comparing variants of a run shows where bits differ, these probes show
why. They also find what a single step does not show: statistics that a recomputation counts twice, in buffers or in
attributes that are only used in evaluation.
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
from torch.utils._pytree import tree_flatten, tree_map

from gpipe_cli.pipeline.profile.reads import Reads
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_tuple, as_value, same_bits
from gpipe_cli.pipeline.runtime.initial_weights import NO_VALUES
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.randomness import seed_generator
from gpipe_cli.pipeline.runtime.saved_activations import storage_of
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.system.accelerator import generators, is_accelerator

FindingKind = Literal["in_place", "random", "state", "foreign"]


@dataclass(frozen=True)
class Finding:
    """Why a layer gives other results in a pipeline than without one."""

    kind: FindingKind
    layer: str
    text: str


@dataclass
class Probed:
    """What the probes found while layers ran."""

    first: dict[str, Finding] = field(default_factory=dict)  # layer name -> the first finding
    draws: bool = False  # some layer draws random numbers from torch's generators, as dropout does

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self.first.values())

    def found(self, kind: FindingKind, layer: str, text: str) -> None:
        self.first.setdefault(layer, Finding(kind, layer, text))


@contextmanager
def probing(stages: Iterable[Stage]) -> Iterator[Probed]:
    """Inside, the layers of `stages` are watched while they run, once or twice on the same micro-batch; afterwards
    buffers, gradients, attributes of modules, and random generators are as before."""
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
    """Watches the layers of one stage: compares a layer's state before and after a run, and the outputs of its runs."""

    def __init__(self, probed: Probed, stage: Stage) -> None:
        self._probed, self._stage, self._device = probed, stage, stage.device
        self.running = ExitStack()  # contexts that are active while a layer runs
        self._reads: Mapping[int, torch.Tensor] = {}  # storage -> a tensor that the running layer has read
        # storages of the stage's tensors, and of what layers were given
        self._known = {storage_of(tensor) for tensor in (*stage.module.parameters(), *stage.module.buffers())}
        self._before: tuple[Any, ...] = ()  # the state when the running layer began
        self._outputs: dict[str, Tensors] = {}  # layer name -> the outputs of its first run
        self._depth = 0  # of calls: a layer may run another one, which it holds without torch's knowledge
        self._differs = False  # a layer's second run gave other outputs, so later layers get other inputs

    def begins(self, name: str, layer: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        held = {key: (tensor, tensor.detach().clone(), tensor._version) for key, tensor in _tensors(layer).items()}
        given = [(tensor, tensor.detach().clone()) for tensor in as_tuple(inputs[0])]
        self._known.update(storage_of(tensor) for tensor, _ in given)
        self._before = held, given, self._generators(), _other_generators(), _attributes(layer)
        if not self._stage.compiled:  # torch refuses to run compiled code under a dispatch mode
            self._reads = self.running.enter_context(Reads()).tensors

    def ended(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self.running.close()
        held, given, generators, others, attributes = self._before
        self._before = ()

        def found(kind: FindingKind, what: str) -> None:
            self._probed.found(kind, name, f"layer {name} {what}")

        if (fault := self._foreign()) is not None:
            found("foreign", f"reads a tensor {fault}")
        if not all(same_bits(*pair) for pair in given):
            self._probed.found("in_place", name, str(ChangedInputError(name)))
            for tensor, value in given:  # these are the previous layer's outputs
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
            # Buffers by version, too: converged spectral norm writes equal values until the weights change. Parameters
            # by value only: torch itself writes to them, to bring them together in memory.
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
        after = _attributes(layer)
        set_anew = [key for key in {**attributes, **after} if not _same(attributes.get(key), after.get(key))]
        if set_anew and self._evaluates_otherwise(layer, inputs[0], attributes, after):
            found(
                "state",
                f"changes its attribute {', '.join(set_anew[:3])} when it is run, and evaluates with it: micro-batches "
                "and recomputations each count, and no checkpoint keeps it; leave that out, or use nn.BatchNorm, whose "
                "statistics are deferred",
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
        """What is wrong with a tensor that the layer has read, in words; None if nothing is."""
        for storage, tensor in self._reads.items():
            if tensor.is_meta:
                return f"{tuple(tensor.shape)} that {NO_VALUES}"
            if storage not in self._known and tensor.requires_grad and tensor.is_leaf:
                return (
                    f"{tuple(tensor.shape)} that its stage does not train, but that of another layer; keep the two "
                    "layers together by partition.balance"
                )
        return None

    def _evaluates_otherwise(
        self, layer: nn.Module, given: Any, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> bool:
        """Whether attributes `before` and `after` give different outputs in evaluation; False if that cannot be run."""
        self._depth += 1  # these runs are not watched
        module = self._stage.module
        training, module.training = module.training, False  # compiled layers then run uncompiled
        try:
            return not all(map(same_bits, *(self._evaluate(layer, given, one) for one in (before, after))))
        except Exception:  # evaluation may expect other inputs, or what a training run leaves: it may raise anything
            return False
        finally:
            module.training = training
            self._depth -= 1

    def _evaluate(self, layer: nn.Module, given: Any, attributes: Mapping[str, Any]) -> Tensors:
        with _put_back(layer), torch.no_grad(), torch.random.fork_rng(_gpus([self._device])):
            seed_generator(self._device, 0)
            for module in layer.modules():
                for name in vars(module).keys() - _OF_EVERY_MODULE:
                    del vars(module)[name]
            for path, value in attributes.items():
                inside, _, name = path.rpartition(".")
                vars(layer.get_submodule(inside))[name] = value
            inputs = tuple(tensor.detach().clone() for tensor in as_tuple(given))
            returned = layer.eval()(as_value(inputs, not isinstance(given, torch.Tensor)))
            return tuple(tensor.clone() for tensor in as_tuple(returned))

    def _generators(self) -> torch.Tensor:
        """The states of torch's own generators: a layer on a GPU may draw on the CPU, too."""
        return torch.cat([generator.get_state() for generator in generators(self._device)])


def _gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    return list(filter(is_accelerator, devices))


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Restores the module's buffers, attributes and gradients; inside, gradients begin as None."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # attributes and buffers are often replaced rather than changed in place
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
    """Write unseen by autograd, which may need the tensor for a backward. An unchanged one may not be writable."""
    if not same_bits(tensor, value):
        tensor.data.copy_(value)


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """The attributes of a layer's modules, by path, without parameters, buffers and modules; data are copied."""
    return {
        f"{path}.{name}" if path else name: tree_map(_copied, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


def _copied(leaf: Any) -> Any:
    """A copy of a tensor, an array or a set; any other object is returned as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone() if _is_plain(leaf) else leaf
    return leaf.copy() if type(leaf) in (np.ndarray, set) else leaf


def _same(one: Any, other: Any) -> bool:
    """Whether two attributes, or nested containers, have the same data; objects that are no data must be identical."""
    (ours, structure), (theirs, other_structure) = tree_flatten(one), tree_flatten(other)
    return bool(structure == other_structure) and all(map(_same_leaf, ours, theirs))


def _same_leaf(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    match one:
        case torch.Tensor():
            return _is_plain(one) and one.device == other.device and same_bits(one, other)
        case np.ndarray():
            return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        case str() | bytes() | int() | float() | complex() | np.generic() | set() | frozenset():
            return bool(one == other)
    return False


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _other_generators() -> dict[str, bytes]:
    """The states of the generators that torch does not control and no stage seeds."""
    states = {"Python's random module": random.getstate(), "numpy.random": np.random.get_state(legacy=True)}
    return {source: pickle.dumps(state) for source, state in states.items()}
