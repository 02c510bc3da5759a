"""Causal convolutions and state-space scans, one sequence at a time.

Each sequence is computed from copies, so that its result depends neither on the other sequences nor
on the memory alignment of its tokens and state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from opweave.ir import IrOp, ops
from opweave.ir.ops.causal_conv import check_conv
from opweave.ir.ops.selective_scan import check_scan
from opweave.ir.ops.selective_state_update import check_update
from opweave.ir.ops.ssd import check_ssd
from opweave.ir.ops.state_slots import check_sequences, check_slots
from opweave.ir.traits import BATCH_INVARIANT
from opweave.kernels.aten.state_slots import IN_PLACE, PACKED, own_slots, sequences

_PER_TOKEN = ("x", "dt", "b", "c", "z")
_SEQUENCES = ("query_start_loc", "slot_idx", "has_initial_state")


def _register(op: IrOp, check: Callable[..., None]) -> None:
    packed = "query_start_loc" in op.schema.names
    one, checked = op.impls["aten"].impl_fn, inspect.signature(check).parameters
    traits = {BATCH_INVARIANT}
    fits = PACKED if packed else IN_PLACE

    @op.register_impl("batch_invariant", supports_args=fits, inplace=True, traits=traits)
    @functools.wraps(op.native)
    def alone(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        given = dict(zip(op.schema.names, op.bind(*args, **kwargs), strict=True))
        check(**{name: given[name] for name in checked})
        x, x_state = given["x"], given["x_state"]
        if packed:
            check_sequences(op.name, *(given[name] for name in _SEQUENCES))
        else:
            check_slots(op.name, given["slot_idx"], x.shape[0])
        tokens = {name: given[name] for name in _PER_TOKEN if given.get(name) is not None}
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        for rows, slot, where in _sequences(packed, given):
            state = x_state[slot : slot + 1].clone()
            part = {name: t[rows].clone() for name, t in tokens.items()}
            out[rows], new = one(**{**given, **part, **where, "x_state": state})
            x_state[slot] = new[0]
        return out, x_state


def _sequences(
    packed: bool, given: dict[str, Tensor]
) -> Iterator[tuple[slice, int, dict[str, Tensor]]]:
    """Yield each sequence's tokens, its slot, and the index arguments for a call with it alone."""
    slot_idx = given["slot_idx"]
    own, first = own_slots(given["x_state"].shape[0], slot_idx), torch.zeros_like(slot_idx[:1])
    if not packed:
        for i, slot in enumerate(own):
            if slot >= 0:
                yield slice(i, i + 1), slot, {"slot_idx": first}
        return
    starts, known = given["query_start_loc"], given["has_initial_state"]
    for rows, slot, has_state in sequences(starts, own, known):
        ends = starts.new_tensor([0, rows.stop - rows.start])
        flag = known.new_tensor([has_state])
        where = {"slot_idx": first, "query_start_loc": ends, "has_initial_state": flag}
        yield rows, slot, where


_register(ops.causal_conv1d, functools.partial(check_conv, "causal_conv1d"))
_register(ops.causal_conv1d_update, functools.partial(check_conv, "causal_conv1d_update"))
_register(ops.selective_scan, check_scan)
_register(ops.selective_state_update, check_update)
_register(ops.ssd_chunk_scan, check_ssd)
