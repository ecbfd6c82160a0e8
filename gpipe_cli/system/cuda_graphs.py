"""Captures CUDA graphs, on NVIDIA's GPUs and AMD's; `pipeline/runtime/graph_capture.py` decides what is captured.

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
def graph_maker(device: torch.device) -> "CudaGraphCapturer | None":
    """The capturer of graphs on `device`; None on a CPU, where launching costs nothing."""
    return CudaGraphCapturer(device) if is_accelerator(device) else None


class CudaGraphCapturer:
    """Captures graphs on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._default = generators(device)[-1]
        self._cuda = torch.get_device_module(device)
        self._default_state = self._default.graphsafe_get_state()
        self._stream = self._cuda.Stream(device)  # a torch.Stream cannot be captured

    def new_pool(self) -> Any:
        """Memory for graphs that are never in use at the same time."""
        return self._cuda.graph_pool_handle()

    def new_rng_state(self) -> torch.Generator:
        return self._default.clone_state()

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """While active, work is launched on the separate stream on which graphs are captured."""
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
        """While active, an operation that makes the host wait for the device raises RuntimeError, in all threads. In a
        capture that would be too late: it may leave older releases of torch capturing."""
        before = self._cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # a warning that not every such operation is found
            self._cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._cuda.set_sync_debug_mode(before)

    @contextmanager
    def capture(self, pool: Any, rng: Sequence[torch.Generator]) -> Iterator[Any]:
        """While active, launches are captured, and need not run. They draw random numbers from any of `rng`."""
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
        """During a capture: draw from `rng` from here on; None: from the default generator."""
        self._default.graphsafe_set_state(self._default_state if rng is None else rng)
