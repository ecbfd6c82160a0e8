"""Captures CUDA graphs: the `CudaGraphCapturer` of `pipeline/runtime/graph_capture.py` for NVIDIA's GPUs, and AMD's.

torch has graphs for all accelerators, `torch.accelerator.Graph`, but as of 2.14 none for CUDA.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

from gpipe_cli.system.accelerator import generators, is_accelerator, using_device


@lru_cache
def graph_maker(device: torch.device) -> "TorchGraphCapturer | None":
    """The capturer of graphs on `device`; None on a CPU, where launching costs nothing."""
    return TorchGraphCapturer(device) if is_accelerator(device) else None


class TorchGraphCapturer:
    """Captures graphs on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._default = generators(device)[-1]
        self._cuda = torch.get_device_module(device)
        self._default_state = self._default.graphsafe_get_state()
        self._stream = self._cuda.Stream(device)  # a torch.Stream cannot be captured

    def new_pool(self) -> Any:
        return self._cuda.graph_pool_handle()

    def new_rng_state(self) -> torch.Generator:
        return self._default.clone_state()

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        with using_device(self._device):
            current = self._cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with self._cuda.stream(self._stream):
                    yield
            finally:  # memory that is freed after an error may still be in use on this stream
                current.wait_stream(self._stream)

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        before = self._cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # a warning that not every such operation is found
            self._cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._cuda.set_sync_debug_mode(before)

    @contextmanager
    def capture(self, pool: Any, rng: Sequence[torch.Generator]) -> Iterator[Any]:
        graph = self._cuda.CUDAGraph()
        for state in rng:
            graph.register_generator_state(state)
        self._default_state = self._default.graphsafe_get_state()
        # with torch 2.11, a graph that the garbage collector frees during a capture ends the capture
        collects = gc.isenabled()
        gc.disable()
        try:
            # other threads, such as a thread that pins the next mini-batch, may call CUDA meanwhile
            with self._cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                yield graph
        except Exception:
            self._default.graphsafe_set_state(self._default_state)
            self._end_capture_of_rng_states(rng)
            raise
        finally:
            self._default.graphsafe_set_state(self._default_state)
            if collects:
                gc.enable()

    def _end_capture_of_rng_states(self, rng: Sequence[torch.Generator]) -> None:
        """After a capture that failed to begin or to end: torch 2.11 leaves its random states, and the default state,
        in the capture, so that neither layers nor graphs could draw any more. An empty capture ends it."""
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            empty = self._cuda.CUDAGraph()
            for state in rng:
                empty.register_generator_state(state)
            with self._cuda.graph(empty, stream=self._stream, capture_error_mode="thread_local"):
                pass

    def use_rng_state(self, rng: torch.Generator | None) -> None:
        self._default.graphsafe_set_state(self._default_state if rng is None else rng)
