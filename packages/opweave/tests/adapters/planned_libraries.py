"""FlashInfer and FlashAttention on the CPU, as far as opweave's paged attention calls them.

They do what the libraries document, assert what they require, and count plans. As in the kernels,
the values of masked keys are multiplied by zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None,
    causal: bool,
    window_left: int,
    soft_cap: float,
) -> Tensor:
    """Return the attention of ``(queries, heads, size)`` over ``(keys, kv_heads, size)``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(group, 1).float() for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    last = torch.arange(len(query))[:, None] + len(keys) - len(query)
    distance = last - torch.arange(len(keys))
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window_left >= 0:
        hidden |= distance > window_left
    probabilities = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", probabilities, values).to(query.dtype)


class Wrapper:
    """Base class of FlashInfer's wrappers for paged caches."""

    plans = 0
    runs = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert not float_workspace_buffer.any(), "must be zero before its first use"
        assert kv_layout == "HND"
        self._buffers: list[Tensor] | None = None

    def _plan(self, qo_indptr: Tensor, parts: tuple[Tensor, ...], sizes: Any, rest: Any) -> None:
        """Keep a plan; *parts* are the bounds of pages, the pages, and the lengths of the last."""
        Wrapper.plans += 1
        indptr, indices, last_page_len = parts
        self._heads, self._kv_heads, self._size, self._page_size = sizes
        assert all(t.dtype is torch.int32 and t.ndim == 1 for t in (qo_indptr, *parts))
        assert not any(t.is_cuda for t in (qo_indptr, indptr, last_page_len))  # read on the host
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1
        assert qo_indptr[0] == indptr[0] == 0
        assert (indptr.diff() > 0).all(), "a sequence without pages"
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= self._page_size)).all()
        self._qo_indptr, self._rest = qo_indptr.clone(), rest
        if self._buffers is None:
            self._buffers = [part.clone() for part in parts]
        elif self._is_fixed:
            assert len(last_page_len) == len(self._buffers[2]), "the batch size is fixed"
            for buffer, part in zip(self._buffers, parts, strict=True):
                buffer[: len(part)] = part
        else:
            self._buffers = [part.clone() for part in parts]

    _is_fixed = False

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        Wrapper.runs += 1
        assert self._buffers is not None, "plan() comes first"
        indptr, indices, last_page_len = self._buffers
        assert q.shape == (self._qo_indptr[-1], self._heads, self._size)
        assert q.dtype is self._rest["q_data_type"]
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (self._kv_heads, self._page_size, self._size)
            assert cache.dtype is self._rest["kv_data_type"]
        out = torch.full_like(q, math.nan)
        for i, last in enumerate(last_page_len.tolist()):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(pages) - 1) * self._page_size + last
            rows = slice(self._qo_indptr[i], self._qo_indptr[i + 1])
            keys, values = (
                cache[pages].transpose(1, 2).flatten(0, 1)[:length] for cache in paged_kv_cache
            )
            out[rows] = attend(
                q[rows],
                keys,
                values,
                scale=self._rest["sm_scale"],
                causal=self._rest["causal"],
                window_left=self._rest["window_left"],
                soft_cap=self._rest["logits_soft_cap"] or 0.0,
            )
        return out


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        **rest: Any,
    ) -> None:
        counts = qo_indptr.diff()
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert (counts > 0).all()
        assert not causal or (counts <= lengths).all()
        parts = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._plan(qo_indptr, parts, sizes, {"causal": causal, **rest})


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self._is_fixed, self._uses_tensor_cores = use_cuda_graph, use_tensor_cores
        if use_cuda_graph:
            self._buffers = [buffer for buffer in buffers if buffer is not None]
            assert len(self._buffers) == 3
            assert len(self._buffers[0]) == len(self._buffers[2]) + 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **rest: Any,
    ) -> None:
        assert self._uses_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8)
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        starts = torch.arange(len(indptr), dtype=torch.int32)
        parts = indptr, indices, last_page_len
        self._plan(starts, parts, sizes, {"causal": False, **rest})


@dataclass
class MLAPlanMetadata:
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    csr = classmethod(lambda cls, *args, **kwargs: cls(*args, **kwargs))

    def tensors(self) -> list[Tensor]:
        return [*vars(self).values()]


class BatchMLAPagedAttentionWrapper:
    """Latent attention by a backend that may plan again for recorded launches."""

    multiples = 128, 64

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert backend == "fa2", "the device is not of capability 9.0"
        given = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        self._buffers = [buffer for buffer in given if buffer is not None]
        assert len(self._buffers) == (4 if use_cuda_graph else 0)
        assert all(t.dtype is torch.int32 and t.ndim == 1 for t in self._buffers)
        assert len({t.data_ptr() for t in self._buffers}) == len(self._buffers)
        self._is_fixed = use_cuda_graph

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        Wrapper.plans += 1
        tensors = metadata.tensors()
        assert all(t.dtype is torch.int32 and t.ndim == 1 for t in tensors)
        assert all(t.is_contiguous() for t in tensors)
        queries, ends, pages, lengths = tensors
        assert queries[0] == ends[0] == 0
        assert (queries.diff() >= 0).all()
        assert torch.equal(ends.diff(), (lengths + page_size - 1) // page_size)
        assert len(pages) >= ends[-1]
        assert q_data_type is kv_data_type
        assert head_dim_ckv % self.multiples[0] == head_dim_kpe % self.multiples[1] == 0
        assert type(causal) is bool
        self._sizes = num_heads, head_dim_ckv, head_dim_kpe, page_size
        self._options = sm_scale, causal, q_data_type
        if not self._is_fixed:
            self._buffers = [t.clone() for t in tensors]
            return
        for i, (buffer, part) in enumerate(zip(self._buffers, tensors, strict=True)):
            assert len(buffer) >= len(part) if i == 2 else buffer.shape == part.shape
            buffer[: len(part)] = part

    def run(self, *, query: Tensor, kv_cache: Tensor) -> Tensor:
        """Return ``(tokens, heads, head_dim_ckv)`` for packed queries and a packed cache."""
        Wrapper.runs += 1
        heads, latent, rope, page_size = self._sizes
        scale, causal, dtype = self._options
        starts, ends, pages, lengths = self._buffers
        assert query.shape == (starts[-1], heads, latent + rope)
        assert kv_cache.shape[1:] == (page_size, latent + rope)
        assert query.dtype is kv_cache.dtype is dtype
        out = query.new_full((len(query), heads, latent), math.nan)
        for i, length in enumerate(lengths.tolist()):
            rows = kv_cache[pages[ends[i] : ends[i + 1]].long()].flatten(0, 1)[:length, None]
            of = slice(starts[i], starts[i + 1])
            out[of] = attend(
                query[of],
                rows,
                rows[..., :latent],
                scale=scale,
                causal=causal,
                window_left=-1,
                soft_cap=0.0,
            )
        return out


mla = SimpleNamespace(
    BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper, MLAPlanMetadata=MLAPlanMetadata
)
utils = SimpleNamespace(is_sm90a_supported=lambda device: False)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Return the attention of ``(batch, seqlen, heads, size)``; pages hold multiples of 256."""
    assert k_cache.shape[1] == v_cache.shape[1]
    assert k_cache.shape[1] % 256 == 0
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert cache_seqlens.dtype is block_table.dtype is torch.int32
    out = torch.zeros_like(q)
    for i, length in enumerate(cache_seqlens.tolist()):
        if length:
            pages = block_table[i, : -(-length // k_cache.shape[1])].long()
            keys, values = (t[pages].flatten(0, 1)[:length] for t in (k_cache, v_cache))
            out[i] = attend(
                q[i],
                keys,
                values,
                scale=softmax_scale,
                causal=False,
                window_left=-1,
                soft_cap=softcap,
            )
    return out
