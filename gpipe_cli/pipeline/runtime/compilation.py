"""Layers compiled by torch.compile separately, so that the compiled code does not depend on the cut (law 1).

All layers are compiled through one function, whose compiled versions torch caches by types, shapes and settings: equal
layers are compiled once per process. Torch's cache on disk serves the other processes of the run, and later runs. A
layer is compiled as a whole or rejected: nothing falls back to slower code unnoticed.

A forward without autograd graph and its recomputation must give the same bits, but torch would compile different code
for the two. So a compiled layer always builds its graph, and the stage drops it where it is not kept.

In evaluation layers run uncompiled: mini-batches there have other sizes, and sentences any length.

Departs from the paper, where XLA compiles the whole program.
"""

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.models.skips import Stash
from gpipe_cli.pipeline.runtime.boundary import as_tuple
from gpipe_cli.pipeline.runtime.deferred_batch_norm import (
    AppliedTwiceError,
    BatchStatistics,
    find_tracking_norms,
    restore_stats,
    swap_stats,
)
from gpipe_cli.system.accelerator import is_accelerator

_UNLIMITED = 1 << 30  # torch would otherwise give up after eight kinds of layers, and run the others uncompiled
_MAX_RECOMPILATIONS = 4  # allowed per layer, such as for inputs that need no gradient
_REASON_CHARACTERS = 200


def compile_counts() -> Counter[str]:
    """The number of `graphs` that torch has compiled in this process (one per kind of layer and micro-batch size), and
    of their forwards and backwards that were `made`, or `found` in torch's cache on disk."""
    from torch._dynamo.utils import counters

    inductor, aot = counters["inductor"], counters["aot_autograd"]
    # a layer whose forward and backward are found together counts once
    from_cache = inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"]
    return Counter(graphs=counters["stats"]["unique_graphs"], made=inductor["fxgraph_cache_miss"], found=from_cache)


def check_compiler(device: torch.device) -> None:
    """Raise InvalidSettingError if torch.compile does not support this Python, or the device's compiler is missing."""
    if not torch._dynamo.is_dynamo_supported():
        version = ".".join(map(str, sys.version_info[:3]))
        raise _compile_error(f"torch {torch.__version__} does not compile on Python {version}")
    if is_accelerator(device):
        from torch.utils._triton import has_triton_package

        if not has_triton_package():
            raise _compile_error("Triton, which compiles for GPUs, is not installed; install it")
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise _compile_error(
            "there is no C++ compiler, which compiling for CPUs needs; install g++, or set CXX"
        ) from None


def compile_layers(module: nn.Sequential, statistics: BatchStatistics) -> None:
    """Make every layer of `module` run compiled in training mode, its batch norms writing to `statistics`. Raises
    InvalidSettingError for a layer with a `forward` set on the object, and InputError as `find_tracking_norms` does."""
    numbers = {norm: statistics.register(norm, path) for norm, path in find_tracking_norms(module).items()}
    for name, layer in module.named_children():
        if isinstance(layer, Stash):  # it returns its input: there is nothing to compile
            continue
        if "forward" in vars(layer):
            raise _compile_error(f"layer {name} has a forward that is an attribute of the object; define it in a class")
        norms = {norm: numbers[norm] for norm in layer.modules() if norm in numbers}
        vars(layer)["forward"] = _CompiledForward(name, module, layer, statistics, norms)


class _CompiledForward:
    """The compiled forward that replaces a layer's forward.

    Compiled code is the same for all micro-batches, so batch norms write their moments into the same memory in every
    call; from there they are copied to the micro-batch's moments in the statistics.
    """

    def __init__(
        self,
        name: str,
        module: nn.Sequential,
        layer: nn.Module,
        statistics: BatchStatistics,
        norms: dict[_BatchNorm, int],
    ) -> None:
        self._name, self._module = name, module
        self._layer: nn.Module = getattr(layer, "compiled_as", layer)
        self._statistics, self._norms = statistics, norms
        self._moments: dict[_BatchNorm, tuple[torch.Tensor, torch.Tensor]] = {}
        for norm in norms:
            assert norm.running_mean is not None
            # zeros, as the old value counts with weight 0, and 0 * NaN is NaN
            self._moments[norm] = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_mean)
        # shapes of the layer's inputs -> values per channel of each norm that runs
        self._values: dict[tuple[torch.Size, ...], dict[_BatchNorm, int]] = {}
        self._recompilations = 0  # for shapes that the layer had been compiled for before

    def __call__(self, value: Any) -> Any:
        if not self._module.training:
            return _forward(self._layer, value)
        redirected = {norm: swap_stats(norm, *self._moments[norm]) for norm in self._norms if norm.training}
        try:
            shapes = tuple(tensor.shape for tensor in as_tuple(value))
            was_compiled = shapes in self._values
            graphs_before = compile_counts()["graphs"]
            if not was_compiled:
                self._values[shapes] = self._count_values(value)
            with errors_name_layer(self._name):
                returned = _compile_forward()(self._layer, value)
            self._recompilations += was_compiled and compile_counts()["graphs"] > graphs_before
            if self._recompilations > _MAX_RECOMPILATIONS:
                why = f"layer {self._name} is compiled again and again, as something in it changes from step to step"
                raise _compile_error(why)
        finally:
            for norm, tracked in redirected.items():
                restore_stats(norm, tracked)
        self._track(self._values[shapes])
        return returned

    @torch.no_grad()
    def _count_values(self, value: Any) -> dict[_BatchNorm, int]:
        """The number of values per channel of each norm's input, found by running the layer uncompiled."""
        values_per_channel: dict[_BatchNorm, int] = {}

        def count(norm: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
            if not norm.training:
                return
            if norm in values_per_channel:
                raise AppliedTwiceError(self._statistics.paths[self._norms[norm]])
            values_per_channel[norm] = inputs[0].numel() // norm.num_features

        if not self._norms:
            return values_per_channel
        hooks = [norm.register_forward_pre_hook(count) for norm in self._norms]
        device = next(iter(self._moments.values()))[0].device
        try:
            with torch.random.fork_rng([device] if is_accelerator(device) else []):
                _forward(self._layer, value)
        finally:
            for hook in hooks:
                hook.remove()
        return values_per_channel

    def _track(self, values: dict[_BatchNorm, int]) -> None:
        targets: list[torch.Tensor] = []
        moments: list[torch.Tensor] = []
        for norm, per_channel in values.items():
            mean, variance = self._statistics.target_of(self._norms[norm], per_channel)
            if mean is not None and variance is not None:
                targets += mean, variance
                moments += self._moments[norm]
        if targets:
            torch._foreach_copy_(targets, moments)


@contextmanager
def errors_name_layer(name: str) -> Iterator[None]:
    """Turns an error of torch's compiler into an InvalidSettingError that names the layer."""
    try:
        yield
    except Exception as error:
        if not _is_compiler_error(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = "; ".join(line.removeprefix("Explanation: ").rstrip(".") for line in lines[:2]) or type(error).__name__
        raise _compile_error(f"layer {name} cannot be compiled ({reason[:_REASON_CHARACTERS]})") from error


def _is_compiler_error(error: BaseException) -> bool:
    from torch._dynamo import exc as dynamo_errors
    from torch._inductor import exc as inductor_errors

    tracing = dynamo_errors.TorchDynamoException, dynamo_errors.FailOnRecompileLimitHit
    return isinstance(error, (*tracing, inductor_errors.CppCompileError, inductor_errors.InvalidCxxCompiler))


def _compile_error(why: str) -> InvalidSettingError:
    return InvalidSettingError("compile", True, f"{why}; or use compile=false")


def _forward(layer: nn.Module, value: Any) -> Any:
    return type(layer).forward(layer, value)


@cache
def _compile_forward() -> Callable[[nn.Module, Any], Any]:
    """`_forward`, compiled for every kind of layer and every shape of its input."""
    from torch import _dynamo, _inductor

    # silences a warning on machines with the CUDA toolkit but no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _dynamo.config.recompile_limit = _dynamo.config.accumulated_recompile_limit = _UNLIMITED
    _dynamo.config.fail_on_recompile_limit_hit = True
    # dropout draws the same numbers as uncompiled, and repeats them from the same seed
    _inductor.config.fallback_random = True
    _inductor.config.cpp.threads = torch.get_num_threads()  # part of the code and of its key in the cache
    if hasattr(_inductor.config, "deterministic"):  # not in torch 2.9, which also times fewer GPU kernels
        # on GPUs no kernel is then chosen by timing, which also fixes the order of sums
        _inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # the processes of a run already compile in parallel; a killed process would leave its compile workers running
        _inductor.config.compile_threads = 1
    return torch.compile(_forward, dynamic=False, fullgraph=True)
