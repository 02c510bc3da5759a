"""Executors: start the workers of an engine, and call them."""

from opweave_engine.parallel.executor.base import Executor
from opweave_engine.parallel.executor.in_process import InProcessExecutor
from opweave_engine.parallel.executor.launch import is_follower, is_launched

__all__ = ["Executor", "InProcessExecutor", "is_follower", "is_launched"]
