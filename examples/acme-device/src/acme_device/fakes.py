"""Shapes and dtypes of the kernels' results, for compilers, which run no kernel."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.register_fake("acme::rms_norm")
def _(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("acme::silu_and_mul")
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.register_fake("acme::scaled_residual")
def _(x: Tensor, residual: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("acme::linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("acme::tiled_linear")
def _(x: Tensor, tiles: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.register_fake("acme::embedding")
def _(input_ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*input_ids.shape, weight.shape[1])


@torch.library.register_fake("acme::attention")
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@torch.library.register_fake("acme::paged_attention")
def _(query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value_cache.shape[-1])


@torch.library.register_fake("acme::add_rms_norm_")
@torch.library.register_fake("acme::rotary_embedding_")
@torch.library.register_fake("acme::reshape_and_cache_")
def _(*_: object) -> None:
    """Change memory only."""
