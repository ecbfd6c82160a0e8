"""Why a layer cannot be pipelined: each is run by itself, on real values, and watched (paper section 2.3).

A stage keeps its input and runs its layers again. That gives the same bits only if a layer leaves its input alone,
draws from torch's generator alone, and remembers nothing between calls. Running the variants shows where bits differ;
this shows why.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gpipe_cli.pipeline.layer_cost import Boundary
from gpipe_cli.pipeline.memory_layout import in_layout
from gpipe_cli.pipeline.micro_batch import Tensors, as_tuple, as_value
from gpipe_cli.pipeline.randomness import seed_generator
from gpipe_cli.reporting.check_report import Finding
from gpipe_cli.training.digests import digest

_SEED, _OTHER_SEED = 1, 2


@dataclass(frozen=True)
class Probed:
    """What the layers of a model do when they are run by themselves."""

    findings: tuple[Finding, ...]
    draws: bool  # whether torch's seed changes what comes out, as with dropout


def probe_layers(
    module: nn.Sequential, inputs: Tensors, device: torch.device, memory_format: torch.memory_format
) -> Probed:
    """Run each layer of `module`, in training mode on `device`, on what the layers before it make of `inputs` (n, ...).

    Ends early at a layer that raises: running the variants tells of that.
    """
    findings: list[Finding] = []
    draws = False
    for name, layer in module.named_children():
        try:
            found, drew, outputs = _probe(name, layer, inputs, device)
        except Exception:  # the user's own code; the reference run fails in the same place and says so
            break
        findings += found
        draws = draws or drew
        inputs = tuple(in_layout(tensor, memory_format) for tensor in outputs)
    return Probed(tuple(findings), draws)


@torch.no_grad()
def _probe(name: str, layer: nn.Module, inputs: Tensors, device: torch.device) -> tuple[list[Finding], bool, Tensors]:
    held = {key: tensor.detach().clone() for key, tensor in _tensors(layer)}

    def run(seed: int) -> tuple[Tensors, Tensors, list[int]]:
        given = tuple(tensor.clone() for tensor in inputs)
        versions = [tensor._version for tensor in given]
        seed_generator(device, seed)
        return as_tuple(layer(as_value(given))), given, versions

    def put_back() -> list[str]:
        changed = []
        for key, tensor in _tensors(layer):
            if key in held and digest((tensor,)) != digest((held[key],)):
                changed.append(key)
                tensor.copy_(held[key])
        return changed

    python, numpy = random.getstate(), _numpy_state()
    outputs, given, versions = run(_SEED)
    values = digest(outputs)
    outputs = tuple(tensor.clone() for tensor in outputs)
    findings = []
    if _touched(inputs, given, versions):
        findings.append(_in_place(name))
    sources = [
        source
        for source, moved in (
            ("Python's random module", random.getstate() != python),
            ("numpy.random", _numpy_state() != numpy),
        )
        if moved
    ]
    changed = put_back()
    again = digest(run(_SEED)[0])
    put_back()
    other = digest(run(_OTHER_SEED)[0])
    put_back()
    if sources:
        findings.append(
            Finding(
                "random",
                name,
                f"layer {name} draws from {' and '.join(sources)}, which no stage can repeat: a recomputation and "
                "another cut get other numbers; use torch's functions",
            )
        )
    elif again != values:
        findings.append(
            Finding(
                "state",
                name,
                f"layer {name} gives other values when it is run again with the same seed: it keeps something between "
                "calls, or draws random numbers from a source that torch's seed does not rule; use torch's functions, "
                "and nothing that is remembered",
            )
        )
    elif changed:
        findings.append(
            Finding(
                "state",
                name,
                f"layer {name} changes its own {', '.join(changed[:3])} when it is run: micro-batches and "
                "recomputations each count; leave that out, or use nn.BatchNorm, whose statistics are deferred",
            )
        )
    # a layer that never gives the same twice says nothing about the seed
    return findings, again == values and other != values, outputs


@torch.no_grad()
def find_in_place(model: nn.Sequential, inputs: Boundary, lengths: Sequence[int]) -> tuple[Finding, ...]:
    """The layers of `model`, on the meta device, that change their input; known without a single value.

    Ends early at a layer that does not accept what it is given.
    """
    findings = []
    tensors = tuple(torch.empty(t.shape(2, lengths), dtype=t.dtype, device="meta") for t in inputs)
    for name, layer in model.named_children():
        versions = [tensor._version for tensor in tensors]
        try:
            outputs = as_tuple(layer(as_value(tensors)))
        except Exception:  # the user's own code; who describes the model says what is wrong with it
            break
        if any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
            findings.append(_in_place(name))
        tensors = tuple(tensor.clone() for tensor in outputs)
    return tuple(findings)


def _in_place(name: str) -> Finding:
    text = (
        f"layer {name} changes its input in place: where a stage begins with it, that destroys what the recomputation "
        "needs, and autograd refuses it; use inplace=False"
    )
    return Finding("in_place", name, text)


def _tensors(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


def _touched(inputs: Tensors, given: Tensors, versions: Sequence[int]) -> bool:
    return any(
        tensor._version != version or digest((tensor,)) != digest((original,))
        for original, tensor, version in zip(inputs, given, versions, strict=True)
    )


def _numpy_state() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return (kind, np.asarray(keys).tobytes(), *rest)
