"""The stat logger: how busy the device is, and how full."""

from __future__ import annotations

import logging
import time

import torch

from acme_device.engine.usage import usage
from opweave import platforms
from opweave.config import EngineConfig
from opweave_engine.metrics import EngineStats, StatLogger

_log = logging.getLogger("opweave.acme")  # below opweave: --log-level shows it


class AcmeStatLogger(StatLogger):
    """Keeps what :class:`~acme_device.engine.usage.Usage` has of it, and logs it when all is done.

    opweave makes one for every engine, on whichever platform; off the device it does nothing.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._watches = platforms.current_platform.name == "acme"
        self._began, self._seconds = time.perf_counter(), 0.0

    def record(self, stats: EngineStats) -> None:
        if self._watches:
            seconds = stats.histograms["step_time"].total
            usage.busy_seconds += seconds - self._seconds
            self._seconds = seconds
            usage.peak_bytes = max(usage.peak_bytes, torch.acme.memory_allocated())

    def shutdown(self) -> None:
        if self._watches:
            lived = time.perf_counter() - self._began
            _log.info(
                "the device was busy for %.1f of %.1f s, and held %.2f GiB at most",
                self._seconds,
                lived,
                usage.peak_bytes / 2**30,
            )
