"""Rotation as a product of complex numbers, rotation rounded, tables, and comparisons."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opweave import native
from opweave.ir.ops.rotary import rotary_embedding

from .oracle import FLUSHING

MAX_POSITION = 64


def table(size: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    angles = 6.3 * torch.rand(
        MAX_POSITION, size // 2, generator=torch.Generator().manual_seed(seed)
    )
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def positions(*shape: int, seed: int = 3, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-MAX_POSITION, MAX_POSITION, shape, generator=generator).to(dtype)


def rotated(x: Tensor, where: Tensor, cache: Tensor, head_size: int, is_neox: bool) -> Tensor:
    """The rotation as a product of complex numbers, in float64."""
    size = cache.shape[1]
    heads = (
        x.double().reshape(where.numel(), math.prod(x.shape[1:]) // head_size, head_size).clone()
    )
    cos, sin = cache[where.flatten()].to(x.dtype).double().chunk(2, -1)
    turn = torch.complex(cos, sin)[:, None]
    pairs = torch.unflatten(heads[..., :size], -1, (2, -1) if is_neox else (-1, 2))
    dim = -2 if is_neox else -1
    first, second = pairs.unbind(dim)
    product = torch.complex(first, second) * turn
    heads[..., :size] = torch.stack((product.real, product.imag), dim).flatten(-2)
    return heads.reshape(x.shape)


def is_rounded_at_each_step(dtype: torch.dtype) -> bool:
    """Whether the active instruction set computes in this dtype itself."""
    module = native.module()
    return module is not None and dtype == torch.float16 and module._isa() == "amx"


def rounded(
    query: Tensor, key: Tensor, where: Tensor, cache: Tensor, head_size: int, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """The definition as it is, or in float32, where products of 16-bit numbers are exact."""
    if is_rounded_at_each_step(query.dtype):
        defined: tuple[Tensor, Tensor] = rotary_embedding.native(
            query, key, where, cache, head_size, is_neox
        )
        return defined
    cache = cache.to(query.dtype).float()
    wide = rotary_embedding.native(query.float(), key.float(), where, cache, head_size, is_neox)
    return wide[0].to(query.dtype), wide[1].to(key.dtype)


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Of values below 8, within three roundings if each step is rounded, or one to 16 bits."""
    steps = got.dtype == torch.float32 or is_rounded_at_each_step(got.dtype)
    roundings = 3 if steps else 0.501
    atol = 4 * roundings * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, atol=atol, rtol=0)


def assert_same(got: Tensor, wanted: Tensor, isa: str) -> None:
    if isa in FLUSHING and got.dtype == torch.bfloat16:
        # It flushes denormals.
        torch.testing.assert_close(got, wanted, atol=2e-38, rtol=0, equal_nan=True)
    else:
        torch.testing.assert_close(got, wanted, atol=0, rtol=0, equal_nan=True)
