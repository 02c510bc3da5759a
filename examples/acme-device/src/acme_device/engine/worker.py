"""The worker: says what a model costs that the device has no kernels for."""

from __future__ import annotations

import logging

import acme_device
from acme_device.engine.usage import usage
from opweave_engine.runner import Worker

_log = logging.getLogger("opweave.acme")  # below opweave: --log-level shows it


class AcmeWorker(Worker):
    """A worker that tells which operators of the first forward ran on the host.

    Such an operator copies its tensors there and back in every step. The log then
    shows why a model is slow. The count restarts for the requests.
    """

    def warm_up(self) -> None:
        acme_device.reset_fallbacks()
        super().warm_up()
        usage.warm_up_on_host = acme_device.fallbacks()
        acme_device.reset_fallbacks()
        found = ", ".join(f"{name} ({n}x)" for name, n in usage.warm_up_on_host.items())
        _log.info("acme:%d: the first forward ran on the host: %s", self.rank, found or "nothing")
