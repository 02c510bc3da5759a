"""Patches of Inductor for kernels that write to their arguments.

See docs/design/inductor-mutation.md.
"""

from __future__ import annotations

import functools
from typing import Any, cast


def correct_mutations() -> None:
    """Apply the patches, once per process."""
    from torch._inductor.loop_body import LoopBody
    from torch._inductor.scheduler import SchedulerNode

    if not getattr(SchedulerNode._compute_attrs, "_opweave", False):
        _keep_mutation_order(cast("Any", SchedulerNode))
        _keep_written_buffers(cast("Any", LoopBody))


def _keep_mutation_order(scheduler_node: Any) -> None:
    """Run a kernel that writes to a buffer before the kernels that read it.

    To fuse two CPU loops of different rank, the scheduler recomputes the reads of one of them
    without the renames of mutated buffers. The fused loop then no longer depends on the kernel that
    fills its input.
    """
    original = scheduler_node._compute_attrs

    @functools.wraps(original)
    def compute_attrs(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mutation_renames:  # idempotent, in case torch does it too
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    cast("Any", compute_attrs)._opweave = True
    scheduler_node._compute_attrs = compute_attrs


def _keep_written_buffers(loop_body: Any) -> None:
    """Do not reuse the memory of mutated buffers in fused loops.

    The C++ backend reads the index expression of every user of a buffer, and fails on users that
    only write.
    """
    from torch._inductor.virtualized import V

    original = loop_body.get_read_expr

    @functools.wraps(original)
    def get_read_expr(self: Any, buffer_name: str) -> Any:
        if buffer_name in V.graph.mutated_buffers:
            return None  # differs from the contiguous index that is required for reuse
        try:
            return original(self, buffer_name)
        except KeyError:
            return None

    loop_body.get_read_expr = get_read_expr
