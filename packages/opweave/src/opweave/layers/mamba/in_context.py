"""Convolutions and scans of the sequences of the current forward.

To a compiler, each is one opaque op, which looks up the sequences and their states when it runs. So
one graph serves any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opweave import ir
from opweave.ir.opaque import opaque_op
from opweave.layers.mamba.stateful import state_dtype
from opweave.layers.mamba.states import SequenceStates, states_of


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: str, activation: str | None
) -> Tensor:
    """Convolve the sequences' tokens, ``(T, channels)``: ``ir.ops.causal_conv1d[_update]``.

    Args:
        x, weight, bias, activation: as in ``ir.ops.causal_conv1d``.
        layer: the name of the layer that owns the states.
    """
    run = _opaque_conv if torch.compiler.is_dynamo_compiling() else _conv
    return run(x, weight, bias, layer, activation)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    layer: str,
) -> Tensor:
    """Scan the sequences' tokens: ``ir.ops.selective_scan`` or ``selective_state_update``.

    Args:
        x, dt, a, b, c, d, z, dt_bias: as in ``ir.ops.selective_scan``.
        layer: the name of the layer that owns the states.
    """
    run = _opaque_scan if torch.compiler.is_dynamo_compiling() else _scan
    return run(x, dt, a, b, c, d, z, dt_bias, layer)


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    layer: str,
    chunk_size: int = 256,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> Tensor:
    """Scan the sequences' tokens: ``ir.ops.ssd_chunk_scan`` or ``selective_state_update``.

    Args:
        x, dt, a, b, c, d, z, dt_bias, chunk_size, dt_min, dt_max: as in ``ir.ops.ssd_chunk_scan``.
        layer: the name of the layer that owns the states.
    """
    run = _opaque_ssd if torch.compiler.is_dynamo_compiling() else _ssd
    return run(x, dt, a, b, c, d, z, dt_bias, layer, chunk_size, dt_min, dt_max)


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: str, activation: str | None
) -> Tensor:
    states = states_of(x)
    shape = (x.shape[1], weight.shape[1] - 1)
    state, results = _state(states, layer, "conv", shape, x), []
    if states.num_decodes:
        # A copy: only the state is given up, since a graph may go on to read x.
        y, state = ir.ops.causal_conv1d_update.maybe_inplace(
            x[: states.num_decodes].clone(), weight, bias, state, states.decodes(), activation
        )
        results.append(y)
    if states.has_others(x):
        y, state = ir.ops.causal_conv1d.maybe_inplace(
            x[states.num_decodes :].clone(), weight, bias, state, *states.others(), activation
        )
        results.append(y)
    states.cache.put(layer, "conv", state)
    return _joined(results)


def _scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    layer: str,
) -> Tensor:
    step = _Step(layer, (*a.shape,), (), {})
    return step.scan(ir.ops.selective_scan, x, dt, a, b, c, d, z, dt_bias)


def _ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    layer: str,
    chunk_size: int,
    dt_min: float | None,
    dt_max: float | None,
) -> Tensor:
    limits = {"dt_min": dt_min, "dt_max": dt_max}
    step = _Step(layer, (*x.shape[1:], b.shape[-1]), (chunk_size,), limits)
    return step.scan(ir.ops.ssd_chunk_scan, x, dt, a, b, c, d, z, dt_bias)


class _Step(NamedTuple):
    """A scan of a layer with a state of *shape*, the options, and the limits of the time step."""

    layer: str
    shape: tuple[int, ...]
    options: tuple[int, ...]
    limits: dict[str, float | None]

    def scan(
        self,
        op: ir.IrOp,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
    ) -> Tensor:
        states = states_of(x)
        state, results = _state(states, self.layer, "ssm", self.shape, x), []

        def part(rows: slice) -> tuple[Tensor | None, ...]:
            gate = None if z is None else z[rows]
            return x[rows].clone(), dt[rows], a, b[rows], c[rows], d, gate, dt_bias

        if states.num_decodes:
            update = ir.ops.selective_state_update.maybe_inplace
            tokens = part(slice(0, states.num_decodes))
            y, state = update(*tokens, state, states.decodes(), **self.limits)
            results.append(y)
        if states.has_others(x):
            tokens = part(slice(states.num_decodes, None))
            y, state = op.maybe_inplace(
                *tokens, state, *states.others(), *self.options, **self.limits
            )
            results.append(y)
        states.cache.put(self.layer, "ssm", state)
        return _joined(results)


def _state(
    states: SequenceStates, layer: str, kind: str, shape: tuple[int, ...], x: Tensor
) -> Tensor:
    return states.cache.get(layer, kind, shape, state_dtype(x.dtype, kind), x.device)


def _joined(results: list[Tensor]) -> Tensor:
    return results[0] if len(results) == 1 else torch.cat(results)


def _like_the_first(x: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_opaque_conv = opaque_op("opweave", "causal_conv1d_in_context", _conv, _like_the_first)
_opaque_scan = opaque_op("opweave", "selective_scan_in_context", _scan, _like_the_first)
_opaque_ssd = opaque_op("opweave", "ssd_chunk_scan_in_context", _ssd, _like_the_first)
