"""Finds layers that a recomputation cannot repeat (paper section 2.3), by running a micro-batch twice.

A recomputation gives the same bits only if a layer leaves its input unchanged, draws random numbers only from torch's
generators, and keeps no state between calls except in buffers, which a stage restores. A tensor that a layer has kept
from the meta device has no values, and gives whatever is in memory. Training would silently go wrong.
"""

import random
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from gpipe_cli.pipeline.profile.tensor_reads import Reads
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_tuple, same_bits
from gpipe_cli.pipeline.runtime.initial_weights import NO_VALUES
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.module_state import python_and_numpy_rng_state, restoring_state
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.system.accelerator import is_accelerator


@contextmanager
def checking_repeatability(stages: Collection[Stage], replicas: int) -> Iterator[list[str]]:
    """While active, the layers of `stages` run a micro-batch twice; the list gets a sentence for each layer that cannot
    repeat it, or would differ between `replicas`. Afterwards buffers, gradients, attributes of modules and random
    generators are as before."""
    problems: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([stage.device for stage in stages if is_accelerator(stage.device)]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state(legacy=True))
        for stage in stages:
            stack.enter_context(restoring_state(stage.module))
            watch = _Watch(problems, stage.compiled, replicas)
            stack.enter_context(watch.reading)
            for name, layer in stage.module.named_children():
                stack.callback(layer.register_forward_pre_hook(watch.before_layer, prepend=True).remove)
                stack.callback(layer.register_forward_hook(partial(watch.after_layer, name)).remove)
        yield problems


class _Watch:
    """Watches the layers of a stage: compares a layer's state before and after a run, and the outputs of its runs."""

    def __init__(self, problems: list[str], compiled: bool, replicas: int) -> None:
        self._problems = problems
        self._compiled = compiled
        self._replicas = replicas
        self.reading = ExitStack()  # holds a mode while a layer runs
        self._reads = Reads()
        self._before: list[Any] = []  # an entry per running layer, as a layer may run another without torch's knowledge
        self._outputs: dict[str, Tensors] = {}  # layer name -> the outputs of its first run

    def before_layer(self, layer: nn.Module, inputs: Any) -> None:
        state_before = {key: (t, t.detach().clone(), t._version) for key, t in _tensors(layer).items()}
        given = [(tensor, tensor.detach().clone()) for tensor in as_tuple(inputs[0])]
        self._before.append((state_before, given, python_and_numpy_rng_state()))
        if len(self._before) == 1 and not self._compiled:  # torch refuses to run compiled code under a dispatch mode
            self._reads = self.reading.enter_context(Reads())

    def after_layer(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        state_before, given, generators = self._before.pop()
        if self._before:
            return
        self.reading.close()
        for tensor in self._reads.tensors.values():
            if tensor.is_meta:
                self._problems.append(f"layer {name} reads a tensor {tuple(tensor.shape)} that {NO_VALUES}")
        if not all(same_bits(*pair) for pair in given):
            self._problems.append(str(ChangedInputError(name)))
        if python_and_numpy_rng_state() != generators:
            self._problems.append(
                f"layer {name} draws from Python's random module or numpy.random, which no recomputation can repeat; "
                "use torch's functions"
            )
        tensors = _tensors(layer)
        for key, (tensor, value, version) in state_before.items():
            # Buffers also by version: converged spectral norm writes equal values until the weights change. Parameters
            # by value only: torch itself writes to them, to bring them together in memory.
            written = tensor._version != version and not isinstance(tensor, nn.Parameter)
            if not written and same_bits(tensors.get(key, value), value):
                continue
            changes = f"layer {name} changes its own {key} when it is run"
            if isinstance(tensor, nn.Parameter):
                self._problems.append(f"{changes}, which is a parameter, and the optimizer's to change; use a buffer")
            elif key not in layer.state_dict():
                self._problems.append(f"{changes}, which no checkpoint has; register it with persistent=True")
            elif tensors.get(key) is not tensor:
                self._problems.append(f"{changes}, by another tensor; write to it in place, as with copy_")
            elif self._replicas > 1:
                why = "in each replica by other samples; use replicas=1, or nn.BatchNorm"
                self._problems.append(f"{changes}, {why}")
            else:
                continue  # a recomputation begins with the buffer that the forward began with
            break
        outputs = as_tuple(output)
        first_outputs = self._outputs.pop(name, None)
        if first_outputs is None:
            self._outputs[name] = tuple(tensor.detach() for tensor in outputs)
        elif not all(map(same_bits, outputs, first_outputs)):
            self._problems.append(
                f"layer {name} gives other values when it is run again with the same seed: it asks whether gradients "
                "are recorded, keeps something between calls, or draws random numbers from "
                "another source than torch's generators; with recompute=never no layer is run again"
            )


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
