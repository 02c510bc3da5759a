"""A process group of this process alone, for ops that contain a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed

from opweave.conformance.subject import Subject

_PARAMETER = "group"  # what an op calls the name of a process group


def needs_group(subject: Subject) -> bool:
    """Whether the op contains a collective."""
    return _PARAMETER in subject.op.schema.names


@contextmanager
def group_for(subject: Subject) -> Iterator[None]:
    """Initialize a process group for the block if the op needs one and it is missing."""
    if not needs_group(subject) or not distributed.is_available() or distributed.is_initialized():
        yield
        return
    backend = "nccl" if subject.device == "cuda" else "gloo"
    untyped: Any = distributed  # which does not export it to type checkers
    distributed.init_process_group(backend, store=untyped.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
