"""Code that torch users would write for ops whose native form is only a definition."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from opweave import ir
from opweave.ir import IrOp


def in_plain_torch(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return *native*, a composite of IR ops or not, with the definitions of these ops instead.

    What is compared is torch without opweave: no dispatch on the way, no op that Inductor cannot
    see into.
    """
    assert isinstance(native, types.FunctionType), native
    used = {name: native.__globals__.get(name) for name in globals_of(native)}
    inner = {name: in_plain_torch(op.native) for name, op in used.items() if isinstance(op, IrOp)}
    if not inner:
        return native
    plain = types.FunctionType(
        native.__code__, {**native.__globals__, **inner}, native.__name__, native.__defaults__
    )
    plain.__kwdefaults__ = native.__kwdefaults__
    return plain


def globals_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of the globals that *function* reads; `co_names` has attributes too."""
    return {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}


def write_slots(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write tokens into the cache, in place; native copies the cache."""
    block_size = key_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def rotate_and_write_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    head_size: int,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate, then write into the cache, in place."""
    rotate = ir.ops.rotary_embedding.native
    rotated, keys = rotate(query, key, positions, cos_sin_cache, head_size, is_neox_style)
    write_slots(keys.view_as(value), value, key_cache, value_cache, slot_mapping)
    return rotated, key_cache, value_cache


def gather_and_attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
) -> Tensor:
    """Attend to sequences of one length that fill their blocks: gather, then torch's attention."""
    sequences = block_tables.shape[0]
    heads, size = query.shape[1:]
    queries = query.view(sequences, -1, heads, size).transpose(1, 2)
    keys, values = (
        cache[block_tables].transpose(1, 2).flatten(2, 3) for cache in (key_cache, value_cache)
    )
    # Attention takes no symbolic bool, which is what Dynamo makes of the comparison alone.
    is_prompt = True if queries.shape[2] > 1 else False  # noqa: SIM210
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=is_prompt, enable_gqa=True
    )
    return attended.transpose(1, 2).reshape(-1, heads, size)


def gather_attend_and_quantize(*arguments: Tensor) -> Tensor:
    """The same, and quantize by one scale, which comes last."""
    *attention, scale = arguments
    quantized: Tensor = ir.ops.static_quant_fp8.native(
        gather_and_attend(*attention).flatten(1), scale
    )
    return quantized
