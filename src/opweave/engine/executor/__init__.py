"""Starts workers, and speaks to them."""

from opweave.engine.executor.base import Executor
from opweave.engine.executor.in_process import InProcessExecutor
from opweave.engine.executor.launch import is_follower, is_launched
from opweave.engine.executor.ranked import RankedExecutor

__all__ = ["Executor", "InProcessExecutor", "RankedExecutor", "is_follower", "is_launched"]
