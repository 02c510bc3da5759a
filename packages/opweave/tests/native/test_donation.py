"""In-place implementations give native's result for any aliasing of arguments.

The conformance kit does so for activations of one shape, as those of fused_add_rms_norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.ir.ops.kv_cache import (
    advance_step_flashattn,
    reshape_and_cache,
    rope_reshape_and_cache,
)
from opweave.ir.ops.rotary import qk_norm_rope, rotary_embedding
from opweave.kernels import opweave_c

Arguments = tuple[Any, ...]

REGISTERED = opweave_c.__all__  # importing it registers what is tested here
OPS = [
    rotary_embedding,
    qk_norm_rope,
    reshape_and_cache,
    rope_reshape_and_cache,
    advance_step_flashattn,
]


def table() -> Tensor:
    angles = torch.linspace(0, 6, 32 * 4).view(32, 4)
    return torch.cat((angles.cos(), angles.sin()), -1)


def rotated(op: IrOp, make: Callable[[], tuple[Tensor, Tensor]]) -> Arguments:
    positions = torch.tensor([3, 0, 31, 7])
    norm = (torch.linspace(0.5, 2, 8), None, 1e-5) if op is qk_norm_rope else ()
    return (*make(), positions, table(), *norm, 8)


def queries_and_keys() -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    def rows() -> Tensor:
        return torch.arange(4.0 * 48).sin().view(4, 48)

    def shifted() -> tuple[Tensor, Tensor]:
        memory = rows().flatten()
        return memory[:64].view(4, 16), memory[16:80].view(4, 16)

    def overlapping() -> tuple[Tensor, Tensor]:
        x = rows()
        return x[:, :32], x[:, 16:32]

    def two_views() -> tuple[Tensor, Tensor]:
        x = rows()
        return x, x.view(4, 6, 8)

    def slices() -> tuple[Tensor, Tensor]:
        x = rows()
        return x[:, :32], x[:, 32:]

    def one_tensor() -> tuple[Tensor, Tensor]:
        x = rows()
        return x, x

    return {
        "slices": slices,
        "overlapping slices": overlapping,
        "shifted": shifted,
        "two views": two_views,
        "one tensor": one_tensor,
        "expanded": lambda: (rows()[:1].expand(4, 48), rows()),
        "expanded heads": lambda: (rows()[:, :8].unsqueeze(1).expand(4, 2, 8), rows()),
        "self-overlapping": lambda: (rows().as_strided((4, 16), (8, 1)), rows()),
    }


def caches() -> dict[str, Callable[[], Arguments]]:
    def cache(seed: int) -> Tensor:
        return torch.arange(4.0 * 2 * 4 * 8).view(4, 2, 4, 8) + seed

    def arguments(key_cache: Tensor, value_cache: Tensor) -> Arguments:
        key, value = torch.arange(2.0 * 3 * 2 * 8).neg().view(2, 3, 2, 8)
        return key, value, key_cache, value_cache, torch.tensor([5, -1, 12])

    def halves() -> Arguments:
        both = torch.stack((cache(0), cache(500)), 1)
        return arguments(both[:, 0], both[:, 1])

    def keys_from_the_cache() -> Arguments:
        key_cache = cache(0)
        key = key_cache[:3, :, 1]
        return key, key.clone(), key_cache, cache(500), torch.tensor([1, 6, 14])

    def shifted() -> Arguments:
        memory = torch.arange(5.0 * 64)
        return arguments(memory[:256].view(4, 2, 4, 8), memory[64:].view(4, 2, 4, 8))

    def two_views() -> Arguments:
        one = cache(0)
        return arguments(one, one.view(4, 2, 4, 8))

    return {
        "separate": lambda: arguments(cache(0), cache(500)),
        "halves": halves,
        "keys from the cache": keys_from_the_cache,
        "shifted": shifted,
        "two views": two_views,
        "expanded": lambda: arguments(cache(0)[:1].expand(4, -1, -1, -1), cache(500)),
    }


def rotated_caches() -> dict[str, Callable[[], Arguments]]:
    def arguments(query: Tensor, cached: Arguments) -> Arguments:
        key, value, key_cache, value_cache, slots = cached
        where = torch.tensor([3, 0, 31])
        return query, key, value, where, table(), key_cache, value_cache, slots, 8

    def rows() -> Tensor:
        return torch.arange(3.0 * 64).sin().view(3, 64)

    def slices() -> Arguments:
        qkv, cached = rows(), caches()["halves"]()
        key, value = (qkv[:, i : i + 16].view(3, 2, 8) for i in (32, 48))
        return arguments(qkv[:, :32], (key, value, *cached[2:]))

    def one_tensor() -> Arguments:
        x = rows()[:, :16].contiguous()
        return arguments(x, (x, x.view(3, 2, 8), *caches()["separate"]()[2:]))

    def shifted() -> Arguments:
        memory = rows().flatten()
        cached = caches()["separate"]()
        return arguments(memory[:96].view(3, 32), (memory[16:64].view(3, 16), *cached[1:]))

    def queries_in_the_cache() -> Arguments:
        cached = caches()["separate"]()
        return arguments(cached[2].view(-1)[:96].view(3, 32), cached)

    found = {name: lambda m=make: arguments(rows(), m()) for name, make in caches().items()}
    return {
        **found,
        "slices": slices,
        "one tensor": one_tensor,
        "shifted queries": shifted,
        "queries in the cache": queries_in_the_cache,
        "expanded queries": lambda: arguments(rows()[:1].expand(3, 64), caches()["separate"]()),
    }


def steps() -> dict[str, Callable[[], Arguments]]:
    def arguments(tokens: Tensor, positions: Tensor) -> Arguments:
        sampled, lengths = torch.tensor([11, 12, 13]), torch.tensor([4, 7, 9])
        tables = torch.arange(12, dtype=torch.int32).view(3, 4)
        return tokens, sampled, positions, lengths, torch.zeros(3).long(), tables, 4

    def shifted() -> Arguments:
        memory = torch.tensor([3, 6, 8, 5])
        return arguments(memory[:3], memory[1:])

    def two_views() -> Arguments:
        one = torch.tensor([3, 6, 8])
        return arguments(one, one.view(3))

    return {
        "separate": lambda: arguments(torch.tensor([1, 2, 3]), torch.tensor([3, 6, 8])),
        "shifted": shifted,
        "two views": two_views,
    }


def cases() -> dict[str, tuple[IrOp, Callable[[], Arguments]]]:
    makers: list[tuple[IrOp, dict[str, Callable[[], Arguments]]]] = [
        (reshape_and_cache, caches()),
        (rope_reshape_and_cache, rotated_caches()),
        (advance_step_flashattn, steps()),
    ]
    for op in (rotary_embedding, qk_norm_rope):
        pairs = queries_and_keys().items()
        makers.append((op, {name: partial(rotated, op, make) for name, make in pairs}))
    return {f"{op.name}, {name}": (op, f) for op, found in makers for name, f in found.items()}


def separate(arguments: Arguments) -> Arguments:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


@pytest.mark.parametrize("case", cases())
def test_functional_and_donated(module: ModuleType, case: str) -> None:
    """Strides are those of the functional call; caches keep theirs, and are not copied for that."""
    op, make = cases()[case]
    arguments, donated = make(), make()
    before = separate(arguments)
    wanted = op.native(*before)
    with ir.priority({op.name: ["opweave_c"]}):
        functional, got = op(*arguments), op.maybe_inplace(*donated)
    torch.testing.assert_close(functional, wanted)
    torch.testing.assert_close(got, wanted)
    assert [t.stride() for t in got] == [t.stride() for t in functional]
    for argument, copy in zip(arguments, before, strict=True):
        assert not isinstance(copy, Tensor) or torch.equal(argument, copy)
    if case.endswith(("separate", "halves")):
        memory = dict(zip(op.schema.names, donated, strict=False))
        for name, t in zip(op.activations, got, strict=True):
            assert t.data_ptr() == memory[name].data_ptr()


def test_every_op_that_works_in_place_is_here(module: ModuleType) -> None:
    in_place = {
        name
        for name, op in ir.ops.rms_norm.registry.ops.items()
        if "opweave_c" in op.impls and op.impls["opweave_c"].inplace
    }
    assert in_place == {"fused_add_rms_norm", *(op.name for op in OPS)}


@pytest.mark.parametrize("donated", [False, True])
def test_what_is_wrong_is_said(module: ModuleType, donated: bool) -> None:
    query, key, far = torch.ones(4, 16), torch.ones(4, 8), torch.tensor([0, 1, 32, 2])
    call = rotary_embedding.maybe_inplace if donated else rotary_embedding
    with (
        ir.priority(rotary_embedding=["opweave_c"]),
        pytest.raises(RuntimeError, match="position 32 of token 2 is out of bounds") as error,
    ):
        call(query, key, far, table(), 8)
    assert error.value.__context__ is None
    assert torch.equal(query, torch.ones(4, 16))
