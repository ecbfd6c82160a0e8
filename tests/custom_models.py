"""Models as a user writes them, for `model.target=custom_models:...`."""

import functools
import importlib
import inspect
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from gpipe_cli.models.skips import Pop, Stash


class Shift(nn.Module):
    """Owns a parameter whose initial value is set in the constructor and nowhere else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def small(width: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        Shift(width),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
    )


def small_without(calls: Mapping[str, int]) -> nn.Sequential:
    """`small`; from now on each call `module.function` fails in this process with that error, as on a disk that does
    not offer it."""

    def refuse(error: int, *_: object, **__: object) -> NoReturn:
        raise OSError(error, os.strerror(error))

    for call, error in calls.items():
        module, _, name = call.rpartition(".")
        setattr(importlib.import_module(module), name, functools.partial(refuse, error))
    return small()


def flattens(width: int = 4) -> nn.Sequential:
    """Two convolutions and a classifier, for 16 pixels; what it flattens is a copy if images are channels last."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 9, 4),
    )


def hourglass(width: int = 4) -> nn.Sequential:
    """Down and up again, for 16 pixels, with skips over each other and one of the images."""
    layers: dict[str, nn.Module] = {
        "images": Stash("images"), "stem": nn.Conv2d(3, width, 3, padding=1), "relu": nn.ReLU(),
        "high": Stash("high"), "down": nn.Conv2d(width, 2 * width, 2, stride=2), "norm": nn.BatchNorm2d(2 * width),
        "low": Stash("low"), "deep": nn.Conv2d(2 * width, 4 * width, 2, stride=2),
        "middle": nn.Conv2d(4 * width, 4 * width, 3, padding=1), "up": nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
        "low_again": Pop("low", "add"), "wide": nn.ConvTranspose2d(2 * width, width, 2, 2), "high_again": Pop("high"),
        "mix": nn.Conv2d(2 * width, 3, 1), "end": Pop("images"), "flat": nn.Flatten(),
        "logits": nn.Linear(6 * 16 * 16, 4),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def normalizes_vectors(pixels: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * pixels**2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def says_costs(costs: Sequence[float | None] = (None,) * 8) -> nn.Sequential:
    model = small()
    for layer, cost in zip(model, costs, strict=True):
        if cost is not None:
            layer.gpipe_cost = cost
    return model


class Does(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> object:
        return self.function(x)


def network(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """A function that builds a network of these layers."""
    return lambda: nn.Sequential(*(layer() for layer in layers))


returns_nested = network(lambda: Does(lambda x: (x, (x, x))), nn.Flatten, lambda: nn.Linear(4, 10))


def reads_values() -> nn.Sequential:
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Flatten(), nn.LazyLinear(10))


def refuses_values(x: torch.Tensor) -> torch.Tensor:
    """Works as long as there is nothing to work on."""
    if not x.is_meta:
        raise RuntimeError("no values\nplease")
    return x


class Tracking(nn.Module):
    """Follows the mean of what it sees, as some norms do, in every call; in place or by another tensor; `counted`:
    so that torch counts the write."""

    def __init__(self, inplace: bool = True, persistent: bool = True, counted: bool = True) -> None:
        super().__init__()
        self.inplace, self.counted = inplace, counted
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inplace:
            (self.seen if self.counted else self.seen.data).lerp_(x.detach().mean(), 0.1)
        else:
            self.seen = self.seen + x.detach().mean()
        return x + 0


class KeepsTensors(nn.Module):
    """Keeps random numbers that are not a buffer, an expanded buffer and a complex one; gives its norm a keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.randn(width, 1, 1)
        self.register_buffer("ones", torch.ones(1).expand(width))
        self.register_buffer("turns", torch.full((width, 1, 1), 0.6 + 0.8j))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(input=(x * self.scale * self.turns).real) + self.ones.sum()


def keeps_tensors(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3), KeepsTensors(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Remembers(nn.Module):
    """Gives what depends on how often it was called, and counts that in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def marks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(x, numbers, mask) of x; the two others need no gradient."""
    return x, torch.arange(len(x), device=x.device), torch.ones(len(x), 1, 1, 1, device=x.device)


class Halves(nn.Module):
    """Halves the mask, in place or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, numbers, mask = inputs
        mask = mask.mul_(0.5) if self.inplace and not x.is_meta else mask * 0.5
        return self.conv(x) * mask * (1 + numbers.view(-1, 1, 1, 1)), numbers, mask


class Wrapped(nn.Module):
    """Takes and returns a tuple of one tensor; of a tensor it would take the first sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert isinstance(inputs, tuple)
        return (self.conv(inputs[0]),)


class Tuples(nn.Module):
    """Makes a tuple of one of a tensor, or takes it out again; in training only, or always."""

    def __init__(self, wraps: bool, always: bool) -> None:
        super().__init__()
        self.wraps, self.always = wraps, always

    def forward(self, x: Any) -> object:
        works = self.training or self.always
        assert isinstance(x, tuple) == (works and not self.wraps), type(x)
        return x if not works else (x,) if self.wraps else x[0]


class Norms(nn.Module):
    """Two norms, the first of which averages all mini-batches, and the other has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.other = nn.BatchNorm2d(4, momentum=None), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.other.register_forward_hook(lambda module, inputs, output: output * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.conv(self.norm(x)))


class Twice(Norms):
    """The first norm is applied twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


def with_layers(*layers: nn.Module) -> nn.Sequential:
    """A small network with these layers between a convolution and a classifier."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))


class Contrary(nn.Module):
    """A fault that only torch's stages have: there the gradient through this layer has the other sign."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        frame = inspect.currentframe()
        while frame is not None and not frame.f_code.co_filename.endswith("pipelining/stage.py"):
            frame = frame.f_back
        return y if frame is None else 2 * y.detach() - y


def contrary() -> nn.Sequential:
    return with_layers(nn.ReLU(), Contrary(), nn.Tanh())


def odd() -> nn.Sequential:
    """What is unusual and allowed, a layer each."""
    return with_layers(
        Tuples(wraps=True, always=True),
        Wrapped(),
        Tuples(wraps=False, always=True),
        Norms(),
        Tuples(wraps=True, always=False),
        Tuples(wraps=False, always=False),
        Does(marks),
        Halves(inplace=False),
        Does(lambda inputs: inputs[0]),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
        nn.Dropout(0.2),
    )


def changes_a_mask() -> nn.Sequential:
    """Its third layer changes a mask in place, but not where shapes are found out."""
    return with_layers(Does(marks), Halves(inplace=True), Does(lambda inputs: inputs[0]))


def looks_at_strides() -> nn.Sequential:
    """Gives what depends on where its input is in memory."""
    return with_layers(Does(lambda x: x.transpose(2, 3)), Does(lambda x: x * (1 + x.stride(2) / 100)))


def network_with(layer: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """A function that builds the small network with such a layer."""
    return lambda: with_layers(layer())


scales_in_place = network_with(lambda: Does(lambda x: (x.detach().mul_(0.5), x + 0)[1]))  # autograd does not see it
# nor does torch's count of changes see this one
halves_unseen = network_with(lambda: Does(lambda x: (x.data.mul_(0.5), x + 0)[1]))
wants_no_values = network_with(lambda: Does(refuses_values))
norms_twice = network_with(Twice)


class CountsCalls(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + 0 * self.calls


counts_its_calls = network_with(CountsCalls)


class Block(nn.Module):
    """Images to images of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(self.conv(x)).relu(), 0.2, self.training) + x


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), Block(), nn.Flatten())


def draws_elsewhere(source: str) -> nn.Sequential:
    """One layer adds noise from a source that torch's seed does not rule."""
    draw: Callable[[], float] = {"random": random.random, "generator": np.random.default_rng(0).random}[source]
    return with_layers(Does(lambda x: x + 0 if x.is_meta else x + float(draw())))


class Holds(nn.Module):
    """Holds another layer without torch's knowledge, and runs it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.conv, self.others = nn.Conv2d(4, 4, 1), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + self.others[0](x)


class Obeys(nn.Module):
    """Behaves as it is told, for sweeps."""

    def __init__(self, way: str, until: str) -> None:
        super().__init__()
        self.way, self.until, self.calls = way, Path(until), 0
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "meta":
            return self.linear(x)
        self.calls += 1
        match self.way:
            case "hungry":
                torch.empty(10**15)
            case "held":  # micro-batches of two samples, after the first four of them, until there is a file
                while len(x) == 2 and self.calls > 4 and not self.until.exists():
                    time.sleep(0.02)
        return self.linear(x)


def told(way: str = "fine", until: str = "") -> nn.Sequential:
    match way:
        case "wrong":
            raise ValueError("way=wrong: cannot be")
        case "exits":
            os._exit(7)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4), Obeys(way, until))


class Keeps:
    """An object that torch does not look into."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.module.weight)


class KeepsTensor(nn.Module):
    """Convolves with a tensor that it holds as a plain attribute."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.tensor)


class Scaled(nn.Module):
    """A parametrization: a weight times the sum of another layer's, which torch does not see."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = (other,)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.others[0].weight.sum()


def hooked(other: nn.Module) -> nn.Module:
    layer = nn.Tanh()
    layer.register_forward_hook(lambda module, inputs, output: output * other.weight.sum())
    return layer


def parametrized(other: nn.Module) -> nn.Module:
    layer = nn.Conv2d(4, 4, 1)
    nn.utils.parametrize.register_parametrization(layer, "weight", Scaled(other))
    return layer


# Layers that read the weight (4, 4, 1, 1) of another one without torch's knowledge, by the way in which they do.
READERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "closure": lambda other: Does(lambda x: nn.functional.conv2d(x, other.weight)),
    "view": lambda other: Does(lambda x: x * other.weight[:3].transpose(0, 1).sum(dim=1, keepdim=True)[:, :, 0]),
    "data in forward": lambda other: Does(lambda x: nn.functional.conv2d(x, other.weight.data)),
    "bound method": lambda other: Does(other.forward),
    "partial": lambda other: Does(functools.partial(nn.functional.conv2d, weight=other.weight)),
    "object": lambda other: Does(Keeps(other)),
    "list": Holds,
    "hook": hooked,
    "parametrization": parametrized,
    "detached": lambda other: KeepsTensor(other.weight.detach()),
    "data": lambda other: KeepsTensor(other.weight.data),
}


def reads_another(ways: Sequence[str], before: bool = False, frozen: bool = False) -> nn.Sequential:
    """Two layers behind a convolution, the first of these has the weight that all `ways` of reading it share; `before`:
    the last."""
    owner = nn.Conv2d(4, 4, 1)
    owner.weight.requires_grad_(not frozen)
    layers = [owner, nn.Tanh(), *(READERS[way](owner) for way in ways)]
    return with_layers(nn.Tanh(), *(reversed(layers) if before else layers), nn.Tanh())


class Caches(nn.Module):
    """Keeps what follows from shapes alone, and what nobody looks at; an evaluation takes from there what it can."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.tables, self.mask, self.last = 0, dict[int, torch.Tensor](), None, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last.append(x)
        self.when = time.perf_counter()
        width = x.shape[-1]
        if width not in self.tables:
            self.tables[width] = torch.arange(width, device=x.device).to(x.dtype)
        if self.mask is None or self.mask.shape != x.shape:
            self.mask = torch.ones_like(x)
        return x * self.mask + self.tables[width]


OF_NO_LAYER = nn.Parameter(torch.randn(4, 4, 1, 1))


def reads_what_no_layer_has(what: str) -> nn.Sequential:
    conv = nn.Conv2d(4, 4, 1)
    functions = {
        "parameter of the module": lambda x: nn.functional.conv2d(x, OF_NO_LAYER),
        "module": lambda x: conv(x),
    }
    return with_layers(Does(functions[what]))


def same_memory(registered: str = "buffer") -> nn.Sequential:
    conv, layer = nn.Conv2d(4, 4, 1), KeepsTensor(torch.empty(0))
    del layer.tensor
    if registered == "buffer":
        layer.register_buffer("tensor", conv.weight.data)
    else:
        layer.tensor = nn.Parameter(conv.weight.data)
    return with_layers(conv, layer)


def skips_one() -> nn.Sequential:
    """Images with a skip over one layer, and a weight of two layers."""
    first, second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    second.weight = first.weight
    return nn.Sequential(Stash("images"), first, Pop("images", "add"), second, nn.Flatten(), nn.Linear(192, 4))
