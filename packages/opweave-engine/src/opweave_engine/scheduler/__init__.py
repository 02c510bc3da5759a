"""Continuous batching: chooses the tokens that each step computes."""

from opweave_engine.scheduler.scheduler import Scheduled, Scheduler

__all__ = ["Scheduled", "Scheduler"]
