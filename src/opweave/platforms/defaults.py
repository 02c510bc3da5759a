"""Defaults of the ``Platform`` contract: qualified names, imported when they are needed."""

from __future__ import annotations

from opweave.base import transaction
from opweave.base.owner import owned_by
from opweave.ir import current_registry
from opweave.plugins import resolve_obj_by_qualname

WORKER = "opweave.engine.runner.worker.Worker"
MODEL_RUNNER = "opweave.engine.runner.model_runner.ModelRunner"
SCHEDULER = "opweave.engine.scheduler.Scheduler"
EXECUTOR = "opweave.engine.parallel.executor.in_process.InProcessExecutor"
SAMPLER = "opweave.engine.sampling.sampler.Sampler"
ATTENTION = "opweave.engine.attention.PagedAttention"
LATENT_ATTENTION = "opweave.engine.attention.LatentPagedAttention"
RANKED_EXECUTOR = "opweave.engine.parallel.executor.ranked.RankedExecutor"
COMMUNICATOR = "opweave.engine.parallel.communicators.TorchCommunicator"
HOST_COMMUNICATOR = "opweave.engine.parallel.communicators.SharedMemoryCommunicator"

_KERNELS = "opweave.kernels.load"


def import_kernels() -> None:
    """Load the kernels that come with opweave."""
    # Not owned by the calling plugin nor part of its transaction: they are imported only once, and
    # must survive a failure of the calling hook.
    with owned_by(None), transaction.detached():
        resolve_obj_by_qualname(_KERNELS)(current_registry())
