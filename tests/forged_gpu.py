"""A training step on GPUs that there are not: its tensors, without values, claim to be on them (torch's own, made for
its compiler). Two things are stand-ins, as torch's need a GPU: events and streams, and the autograd engine, in whose
place every parameter gets a gradient.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_cli.pipeline.runtime import transport
from gpipe_cli.training import engine as engines

aten = torch.ops.aten


class Watched(TorchDispatchMode):
    """Refuses operations for which the host would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            assert args[0].device.type == "cpu", "a value is read from the GPU"
            return 8.0 if args[0].is_floating_point() else 8
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned.page_locked = True
            return pinned
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[1] if func is aten.copy_.default else args[0]
            target = args[0].device if func is aten.copy_.default else torch.device(kwargs.get("device", source.device))
            if source.device.type != target.type:
                assert kwargs.get("non_blocking") or True in args[2:], (
                    f"waits for a copy from {source.device} to {target}"
                )
                assert source.is_cuda or hasattr(source, "page_locked"), "waits for a copy from pageable memory"
        if func is aten._fused_sgd_.default:  # torch does not have it for tensors without values
            return None
        return func(*args, **kwargs)  # one whose shape depends on values raises: a GPU's would have to be read


class Event:
    """Of a GPU that has done everything but the step that is being launched."""

    step = made = waited = 0

    def __init__(self, device: object = None, enable_timing: bool = False) -> None:
        Event.made += 1

    def record(self, stream: object = None) -> "Event":
        self.of = 0 if isinstance(stream, Beside) else Event.step
        return self

    def synchronize(self) -> None:
        assert self.of < Event.step, "the host waits for the step that it launches"
        Event.waited += 1

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Stream(AbstractContextManager["Stream"]):
    def __exit__(self, *raised: object) -> None:
        pass

    def record_event(self) -> Event:
        return Event().record()

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass


class Beside(Stream):
    """A stream of its own, which is not the current one."""


def forge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in their places."""

    def backward(roots: Sequence[GradientEdge], gradients: object) -> None:
        nodes, seen = [root.node for root in roots], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            if hasattr(node, "variable"):
                node.variable.grad = torch.empty_like(node.variable)

    monkeypatch.setattr(torch.autograd, "backward", backward)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", lambda device: Beside())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()] * 8)
    monkeypatch.setattr(transport, "keep_for", lambda tensor, stream: None)
    monkeypatch.setattr(engines, "materialize", materialize)


class Made(nn.Sequential):
    def to(self, *arguments: Any, **changes: Any) -> "Made":  # type: ignore[override]
        return self


def materialize(model: nn.Sequential, first: int, layers: int, *, device: torch.device, **others: Any) -> nn.Sequential:
    """The layers with tensors without values on `device`."""
    made = Made()
    for name, layer in list(model.named_children())[first : first + layers]:
        for module in layer.modules():
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    module._parameters[key] = nn.Parameter(torch.empty(tensor.shape, device=device))
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    module._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        made.add_module(name, layer)
    return made
