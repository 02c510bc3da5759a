"""Independent definitions of the ops: loops and float64 in numpy, or another library's code.

Nothing here calls opweave. Each oracle takes the op's arguments and returns what is right in exact
arithmetic, but for roundings that the op's definition asks for, which are made explicitly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


def _wide(t: Tensor) -> np.ndarray[Any, Any]:
    return t.detach().to(torch.float64).numpy()


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Outputs:
    values = _wide(x)
    out = np.empty_like(values)
    for i in np.ndindex(values.shape[:-1]):
        row = values[i]
        measured = row[: len(row) if variance_size is None else variance_size]
        mean = sum(float(v) * float(v) for v in measured) / max(len(measured), 1)
        out[i] = row / math.sqrt(mean + epsilon) if len(measured) else row
    y = torch.from_numpy(out)
    if weight is not None:
        # The definition: the normalized values and the product have the weight's dtype.
        y = (y.to(weight.dtype).double() * weight.detach().double()).to(weight.dtype)
    return (y.to(x.dtype),)


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Outputs:
    total = torch.from_numpy(_wide(x) + _wide(x_residual)).to(x.dtype)
    return rms_norm(total, weight, epsilon, variance_size)[0], total


def _gated(x: Tensor, act: Callable[[float], float], first: bool) -> Outputs:
    values = _wide(x)
    half = values.shape[-1] // 2
    one, two = values[..., :half], values[..., half:]
    gate, other = (one, two) if first else (two, one)
    activated = np.vectorize(act, otypes=[np.float64])(gate) if gate.size else gate
    # The definition: the activation is rounded to the dtype of x, then multiplied.
    rounded = torch.from_numpy(np.ascontiguousarray(activated)).to(x.dtype)
    return (torch.from_numpy(_wide(rounded) * other).to(x.dtype),)


def _silu(v: float) -> float:
    return v / (1 + math.exp(-v)) if v > -700 else 0.0


def silu_and_mul(x: Tensor) -> Outputs:
    return _gated(x, _silu, True)


def mul_and_silu(x: Tensor) -> Outputs:
    return _gated(x, _silu, False)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Outputs:
    if approximate == "none":
        return _gated(x, lambda v: v / 2 * (1 + math.erf(v / math.sqrt(2))), True)
    root = math.sqrt(2 / math.pi)
    return _gated(x, lambda v: v / 2 * (1 + math.tanh(root * (v + 0.044715 * v**3))), True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Outputs:
    y = np.einsum("...i,oi->...o", _wide(x), _wide(weight))
    return (torch.from_numpy(y if bias is None else y + _wide(bias)).to(x.dtype),)


def embedding(input_ids: Tensor, weight: Tensor) -> Outputs:
    rows = [weight[int(i)] for i in input_ids.flatten()]
    stacked = torch.stack(rows) if rows else weight[:0]
    return (stacked.reshape(*input_ids.shape, weight.shape[-1]),)


def _rotated(head: Sequence[float], cos: Any, sin: Any, neox: bool) -> list[float]:
    half = len(cos)
    out = list(head)
    for i in range(half):
        a, b = (i, i + half) if neox else (2 * i, 2 * i + 1)
        out[a] = head[a] * cos[i] - head[b] * sin[i]
        out[b] = head[b] * cos[i] + head[a] * sin[i]
    return out


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    is_neox_style: bool = True,
    enable_fp32_compute: bool = False,
) -> Outputs:
    if not enable_fp32_compute:  # the definition: angles are rounded to the dtype of x
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    values, c, s = _wide(x), _wide(cos), _wide(sin)
    out = np.empty_like(values)
    for i in np.ndindex(values.shape[:-1]):
        token = i[-2]
        out[i] = _rotated(values[i].tolist(), c[token], s[token], is_neox_style)
    return (torch.from_numpy(out).to(x.dtype),)


def rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> Outputs:
    angles = _wide(cos_sin_cache.to(x_query.dtype))
    half = angles.shape[-1] // 2
    results = []
    for x in (x_query, x_key):
        heads = math.prod(x.shape[positions.ndim :]) // head_size
        values = _wide(x.reshape(positions.numel(), heads, head_size))
        out = np.empty_like(values)
        for token, position in enumerate(positions.flatten().tolist()):
            for head in range(values.shape[1]):
                row = angles[position]
                out[token, head] = _rotated(
                    values[token, head].tolist(), row[:half], row[half:], is_neox_style
                )
        results.append(torch.from_numpy(out).reshape(x.shape).to(x.dtype))
    return tuple(results)


def rotary_embedding_single(
    x: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox_style: bool = True
) -> Outputs:
    return rotary_embedding(x, x, positions, cos_sin_cache, head_size, is_neox_style)[:1]


def dual_chunk_rotary_embedding(
    x_query: Tensor,
    x_key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    chunk_size: int,
    local_size: int,
    is_neox_style: bool = True,
) -> Outputs:
    size = chunk_size - local_size
    slots: list[Callable[[int], int]] = [
        lambda p: p % size,
        lambda p: min(p % size + size, chunk_size),
        lambda p: min(2 * size - 1, chunk_size),
        lambda p: p % size + size,
        lambda p: p % size + chunk_size,
    ]

    def rotated(x: Tensor, slot: Callable[[int], int]) -> Tensor:
        where = torch.tensor([slot(p) for p in positions.flatten().tolist()], dtype=torch.int64)
        flat = x.reshape(len(where), math.prod(x.shape[positions.ndim :]))
        (out,) = rotary_embedding_single(flat, where, cos_sin_cache, head_size, is_neox_style)
        return out.reshape(*positions.shape, flat.shape[-1])

    return torch.cat([rotated(x_query, s) for s in slots], -1), rotated(x_key, slots[0])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> np.ndarray[Any, Any]:
    """One sequence, each side ``(length, heads, size)``, a query and a key at a time."""
    q, k, v = _wide(query), _wide(key), _wide(value)
    group = q.shape[1] // k.shape[1]
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = np.zeros((q.shape[0], q.shape[1], v.shape[-1]))
    for i in range(q.shape[0]):
        position = i + k.shape[0] - q.shape[0]
        keys = range(k.shape[0])
        if causal:
            keys = range(
                max(0, 0 if window is None else position - window + 1), max(position + 1, 0)
            )
        for h in range(q.shape[1]) if len(keys) else ():
            scores = [factor * float(q[i, h] @ k[j, h // group]) for j in keys]
            if soft_cap is not None:
                scores = [soft_cap * math.tanh(s / soft_cap) for s in scores]
            weights = [math.exp(s - max(scores)) for s in scores]
            for w, j in zip(weights, keys, strict=True):
                out[i, h] += w / sum(weights) * v[j, h // group]
    return out


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Outputs:
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for i in range(query.shape[0]):
        out[i] = _attention(query[i], key[i], value[i], scale, True, window, soft_cap)
    return (torch.from_numpy(out).to(query.dtype),)


def bidirectional_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Outputs:
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for i in range(query.shape[0]):
        out[i] = _attention(query[i], key[i], value[i], scale, False, None, None)
    return (torch.from_numpy(out).to(query.dtype),)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Outputs:
    out = np.zeros((*query.shape[:2], value.shape[-1]))
    for i in range(cu_seqlens_q.numel() - 1):
        q = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        k = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        out[q] = _attention(query[q], key[k], value[k], scale, causal, window, soft_cap)
    return (torch.from_numpy(out).to(query.dtype),)


def _latent_heads(kv_c: Tensor, k_pe: Tensor, weight: Tensor, heads: int, nope: int) -> Outputs:
    """Keys and values of every head, float64."""
    expanded = np.einsum(
        "tl,hrl->thr", _wide(kv_c), _wide(weight).reshape(heads, -1, weight.shape[1])
    )
    shared = np.repeat(_wide(k_pe)[:, None], heads, 1)
    key = np.concatenate((expanded[..., :nope], shared), -1)
    return torch.from_numpy(key), torch.from_numpy(expanded[..., nope:].copy())


def mla_attention_prefill(
    query: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_weight: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None = None,
    causal: bool = True,
) -> Outputs:
    heads, nope = query.shape[1], query.shape[2] - k_pe.shape[1]
    key, value = _latent_heads(kv_c, k_pe, kv_b_weight, heads, nope)
    (out,) = varlen_attention(query.double(), key, value, cu_seqlens_q, cu_seqlens_k, scale, causal)
    return (out.to(query.dtype),)


def advance_step_flashattn(
    input_tokens: Tensor,
    sampled_token_ids: Tensor,
    input_positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> Outputs:
    tokens, positions, lengths, slots = (
        t.clone() for t in (input_tokens, input_positions, seq_lens, slot_mapping)
    )
    for i, length in enumerate(seq_lens.tolist()):
        if i < len(sampled_token_ids):
            block, offset = divmod(length, block_size)
            tokens[i], positions[i], lengths[i] = int(sampled_token_ids[i]), length, length + 1
            slots[i] = int(block_tables[i, block]) * block_size + offset
        else:
            tokens[i], positions[i], slots[i] = 0, 0, -1
    return tokens, positions, lengths, slots
