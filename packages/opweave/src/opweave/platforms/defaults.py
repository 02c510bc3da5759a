"""Defaults of the ``Platform`` contract: qualified names, imported when they are needed."""

from __future__ import annotations

from opweave.base import transaction
from opweave.base.owner import owned_by
from opweave.ir import current_registry
from opweave.plugins import resolve_obj_by_qualname

WORKER = "opweave_engine.runner.worker.Worker"
MODEL_RUNNER = "opweave_engine.runner.model_runner.ModelRunner"
SCHEDULER = "opweave_engine.scheduler.Scheduler"
EXECUTOR = "opweave_engine.parallel.executor.in_process.InProcessExecutor"
SAMPLER = "opweave_engine.sampling.sampler.Sampler"
ATTENTION = "opweave_engine.attention.PagedAttention"
LATENT_ATTENTION = "opweave_engine.attention.LatentPagedAttention"
RANKED_EXECUTOR = "opweave_engine.parallel.executor.ranked.RankedExecutor"
COMMUNICATOR = "opweave_engine.parallel.communicators.TorchCommunicator"
HOST_COMMUNICATOR = "opweave_engine.parallel.communicators.SharedMemoryCommunicator"

_KERNELS = "opweave.kernels.load"


def import_kernels() -> None:
    """Load the kernels that come with opweave."""
    # Not owned by the calling plugin nor part of its transaction: they are imported only once, and
    # must survive a failure of the calling hook.
    with owned_by(None), transaction.detached():
        resolve_obj_by_qualname(_KERNELS)(current_registry())
