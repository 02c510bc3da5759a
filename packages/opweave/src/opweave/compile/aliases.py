"""Alias analysis of tensors: whether two of them share memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from opweave.compile import compat
from opweave.ir import memory
from opweave.ir.memory import disjoint


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors, real or fake, may share elements."""
    return _same_storage(a, b) and (a is b or _is_wrapped(a, b) or not disjoint(a, b))


def coincide(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors, real or fake, provably share elements."""
    return _same_storage(a, b) and (a is b or (not _is_wrapped(a, b) and memory.coincide(a, b)))


def overlaps_another(inputs: Sequence[object], positions: Iterable[int]) -> bool:
    """Return whether a tensor at one of *positions* may share elements with another input."""
    return any(
        other != position and isinstance(value, Tensor) and share_elements(given, value)
        for position in positions
        for given in (inputs[position],)
        if isinstance(given, Tensor)
        for other, value in enumerate(inputs)
    )


def note_writes(inputs: Sequence[Any], positions: Iterable[int]) -> None:
    """Bump the version counters of donated inputs.

    A backward pass that has saved one of them then raises torch's error instead of returning a
    wrong gradient.
    """
    if torch.is_inference_mode_enabled():
        return
    written = [inputs[position] for position in positions]
    # The memory of tensors that require a gradient is never reused.
    torch.autograd.graph.increment_version([t for t in written if not t.requires_grad])


def _same_storage(a: Tensor, b: Tensor) -> bool:
    key = compat.storage_key(a)
    return key is not None and key == compat.storage_key(b)


def _is_wrapped(a: Tensor, b: Tensor) -> bool:
    """Return whether a functorch transform wraps a tensor, whose strides then say nothing."""
    return compat.is_wrapped(a) or compat.is_wrapped(b)
