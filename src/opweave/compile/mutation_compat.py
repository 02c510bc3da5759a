"""Corrections of torch's Inductor, for kernels that write to their arguments.

See docs/design/inductor-mutation.md.
"""

from __future__ import annotations

import functools
from typing import Any, cast


def correct_mutations() -> None:
    """Make Inductor respect writes to buffers; see docs/design/inductor-mutation.md."""
    from torch._inductor.loop_body import LoopBody
    from torch._inductor.scheduler import SchedulerNode

    if not getattr(SchedulerNode._compute_attrs, "_opweave", False):
        _keep_mutation_order(cast("Any", SchedulerNode))
        _keep_written_buffers(cast("Any", LoopBody))


def _keep_mutation_order(scheduler_node: Any) -> None:
    """Run a kernel that writes to a buffer before those that read it.

    To fuse two CPU loops of different rank, the scheduler computes the reads of one of them again,
    and forgets which buffers have been written to since they were allocated. The fused loop then no
    longer waits for the kernel that fills its input.
    """
    original = scheduler_node._compute_attrs

    @functools.wraps(original)
    def compute_attrs(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mutation_renames:  # renaming twice changes nothing, should torch do it one day
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    cast("Any", compute_attrs)._opweave = True
    scheduler_node._compute_attrs = compute_attrs


def _keep_written_buffers(loop_body: Any) -> None:
    """Keep buffers that are written to in place out of the memory of a fused loop.

    The C++ backend asks how every user of a buffer reads it, and fails on one that only writes.
    """
    from torch._inductor.virtualized import V

    original = loop_body.get_read_expr

    @functools.wraps(original)
    def get_read_expr(self: Any, buffer_name: str) -> Any:
        if buffer_name in V.graph.mutated_buffers:
            return None  # not the contiguous index that a buffer of the loop must have
        try:
            return original(self, buffer_name)
        except KeyError:
            return None

    loop_body.get_read_expr = get_read_expr
