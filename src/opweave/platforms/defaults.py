"""What a platform gets that brings nothing of its own: names, looked up when they are needed."""

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
    """Load the kernels that come with opweave. They are opweave's own, whoever asks for them."""
    # Whatever becomes of the hook that asks for them: they are imported only once.
    with owned_by(None), transaction.detached():
        resolve_obj_by_qualname(_KERNELS)(current_registry())
