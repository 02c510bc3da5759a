"""Several engines, in processes of their own, that share the requests: data parallelism."""

from opweave.engine.parallel.data_parallel.engine import DataParallelEngine

__all__ = ["DataParallelEngine"]
