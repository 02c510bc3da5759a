"""Recorded kernel launches of a device, which are replayed without the host code between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class GraphRecorder(Protocol):
    """Records what a function launches on a device. One recorder serves a whole model."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the launches of *run* on the same memory.

        *run* is called at least twice: before the recording, for what kernels do on their first
        call only. Only launches are repeated: what *run* does on the host is not.

        Raises:
            RuntimeError: the device cannot record what *run* does, such as waiting for a result.
        """


class CudaGraphRecorder:
    """Records CUDA graphs, which share one memory pool.

    The memory of a graph's results may be reused by another graph's replay.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record with a stream of its own, as ``torch.cuda.graph`` requires."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
