"""Data parallelism: replicas of an engine in processes of their own share the requests."""

from opweave_engine.parallel.data_parallel.engine import DataParallelEngine

__all__ = ["DataParallelEngine"]
