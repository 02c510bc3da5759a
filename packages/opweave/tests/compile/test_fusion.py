"""The fusion table: each composite, in each form, in a model that contains it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir
from opweave.compile import fusion_table
from opweave.compile.report import MatchReport

from .conftest import all_native, compiled

T, H = 8, 64
BF16 = torch.bfloat16
W = torch.randn(H).to(BF16)
SCALE = torch.tensor([0.05])
CACHE = torch.randn(32, 16).to(BF16)
POSITIONS = torch.arange(T)
# A paged cache: one sequence of 13 keys, the last 8 of which are new.
CACHES = torch.randn(2, 3, 2, 16, 16).to(BF16)
SLOTS = torch.arange(T) + 5
SEQUENCE = (
    torch.tensor([[0, 2]], dtype=torch.int32),
    torch.tensor([13], dtype=torch.int32),
    torch.tensor([0, T], dtype=torch.int32),
)
o = ir.ops


def norm(a: Tensor, weight: Tensor | None = W) -> Tensor:
    result: Tensor = o.rms_norm(a, weight, 1e-5)
    return result


def fp8(a: Tensor, scale: Tensor = SCALE) -> Tensor:
    result: Tensor = o.static_quant_fp8(a, scale)
    return result


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = o.rotary_embedding(q, k, POSITIONS, CACHE, 16, *options)
    k, v = k.view(T, 2, 16), v.view(T, 2, 16)
    return q, *o.reshape_and_cache(k, v, CACHES[0], CACHES[1], SLOTS)


def attend(q: Tensor, *options: Any) -> Tensor:
    found: Tensor = o.paged_attention(q.view(T, 4, 16), CACHES[0], CACHES[1], *SEQUENCE, *options)
    return found


def norm_and_rotate(a: Tensor, r: Tensor, *options: Any, epsilon: float = 1e-6) -> Any:
    q = o.rms_norm(a.view(T, 4, 16), W[:16], 1e-6).view(T, H)
    k = o.rms_norm(r.view(T, 4, 16), W[16:32], epsilon).view(T, H)
    return o.rotary_embedding(q, k, POSITIONS, CACHE, 16, *options)


def rotate_before_writing(a: Tensor, r: Tensor, heads: int = 2) -> tuple[Any, Any]:
    """Return the rotated queries and keys, and the caches with those keys."""
    rotated = o.rotary_embedding(a, r[:, :32], POSITIONS, CACHE, 16)
    tokens = (t.view(T, heads, -1) for t in (rotated[1], r[:, 32:]))
    caches = (cache.view(3, heads, 16, -1) for cache in CACHES)
    return rotated, o.reshape_and_cache(*tokens, *caches, SLOTS)


def fused(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[MatchReport]:
    """Compile, compare with eager, and return what fusion did."""
    expected = function(*inputs)
    torch.compiler.reset()
    run = compiled(function, **options)
    found = run(*inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2e-2)
        assert x.shape == y.shape
    return opweave.compile.report().fusions


def names(fusions: list[MatchReport]) -> list[str]:
    return sorted(f.op for f in fusions if f.outcome == "fused")


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (T, H))).to(BF16)


FORMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add and norm": ("fused_add_rms_norm", lambda a, r: (norm(a + r), a + r)),
    "add and norm, commuted": (
        "fused_add_rms_norm",
        lambda a, r: ((s := r + a), o.rms_norm(s, W, epsilon=1e-6)),
    ),
    "add and norm, no weight, keyword": (
        "fused_add_rms_norm",
        lambda a, r: (o.rms_norm(a + r, weight=None, epsilon=1e-5, variance_size=None),),
    ),
    "norm and static fp8": ("rms_norm_static_quant_fp8", lambda a, r: (fp8(norm(a)), r)),
    "norm and per-token fp8": (
        "rms_norm_dynamic_per_token_quant_fp8",
        lambda a, r: o.dynamic_per_token_quant_fp8(norm(a, None)),
    ),
    "norm and per-token int8": (
        "rms_norm_dynamic_per_token_quant_int8",
        lambda a, r: o.dynamic_per_token_quant_int8(norm(a)),
    ),
    "add, norm and static fp8": (
        "fused_add_rms_norm_static_quant_fp8",
        lambda a, r: (fp8(norm(a + r)), a + r),
    ),
    "composite and static fp8": (
        "fused_add_rms_norm_static_quant_fp8",
        lambda a, r: ((p := o.fused_add_rms_norm(a, r, W, 1e-5)) and fp8(p[0]), p[1]),
    ),
    "add, norm and per-token fp8": (
        "fused_add_rms_norm_dynamic_per_token_quant_fp8",
        lambda a, r: (*o.dynamic_per_token_quant_fp8(norm(a + r)), a + r),
    ),
    "silu and static fp8": (
        "silu_and_mul_static_quant_fp8",
        lambda a, r: (fp8(o.silu_and_mul(a)),),
    ),
    "silu and groups, through views": (
        "silu_and_mul_per_token_group_quant_fp8",
        lambda a, r: o.per_token_group_quant_fp8(
            o.silu_and_mul(a.view(2, T // 2, H)).view(T, H // 2), 16
        ),
    ),
    "norms and rotation": ("qk_norm_rope", norm_and_rotate),
    "norms and rotation, interleaved": ("qk_norm_rope", lambda a, r: norm_and_rotate(a, r, False)),
    "rotation into the cache": (
        "rope_reshape_and_cache",
        lambda a, r: rotate_and_write(a, *r.split(32, -1)),
    ),
    "rotation into the cache, by heads, interleaved": (
        "rope_reshape_and_cache",
        lambda a, r: rotate_and_write(
            torch.unflatten(a, -1, (-1, 16)), *torch.unflatten(r, -1, (-1, 16)).split(2, 1), False
        ),
    ),
    "rotation into the cache, queries seen as heads": (
        "rope_reshape_and_cache",
        lambda a, r: (
            (p := rotate_and_write(a, *r.split(32, -1))) and p[0].view(T, 4, 16).sin(),
            p[1],
        ),
    ),
    "rotation into the cache, queries used before": (
        "rope_reshape_and_cache",
        lambda a, r: ((p := rotate_before_writing(a, r)) and p[0][0] * 2, *p[1]),
    ),
    "attention and static fp8": ("attention_quant", lambda a, r: (fp8(attend(a).view(T, H)),)),
    "attention and static fp8, with options": (
        "attention_quant",
        lambda a, r: (fp8(attend(a, 0.3, True, 5, 8.0).flatten(1)),),
    ),
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_found(form: str) -> None:
    composite, function = FORMS[form]
    assert names(fused(function, x(), x())) == [composite]
    chosen = {node.op: node for node in opweave.compile.report().nodes}[composite]
    assert chosen.chosen == "opweave_c"
    assert len(chosen.fused_from) >= 2


MISSES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "the norm is returned": (
        "rms_norm_static_quant_fp8",
        "is used elsewhere, by output",
        lambda a, r: ((n := norm(a)), fp8(n)),
    ),
    "something stands between": (
        "fused_add_rms_norm_static_quant_fp8",
        "operand 0 of .* is aten.mul.Tensor, not aten.add.Tensor",
        lambda a, r: ((n := norm(a * r)), fp8(n)),
    ),
    "no kernel takes the arguments": (
        "fused_add_rms_norm",
        "no kernel for it: opweave_c: .*float64",
        lambda a, r: (norm(a.double() + r.double(), None),),
    ),
    "a number that is not looked for": (
        "fused_add_rms_norm",
        "operand 3 of rms_norm is 8, not None",
        lambda a, r: (o.rms_norm(a + r, W, 1e-5, variance_size=8),),
    ),
    "the call site names a provider": (
        "fused_add_rms_norm",
        "sets its own priority",
        lambda a, r: (o.rms_norm.using("native")(a + r, W, 1e-5),),
    ),
    "different weights": (
        "qk_norm_rope",
        "epsilon|elsewhere it is",
        lambda a, r: norm_and_rotate(a, r, epsilon=1e-5),
    ),
    "the rotated keys are returned": (
        "rope_reshape_and_cache",
        "is used elsewhere, by output",
        lambda a, r: ((p := rotate_before_writing(a, r))[0][1], *p[1]),
    ),
    "the cache has other heads": (
        "rope_reshape_and_cache",
        "rope_reshape_and_cache does not take these arguments: .*key must be|not bfloat16",
        lambda a, r: ((p := rotate_before_writing(a, r, heads=1))[0][0], *p[1]),
    ),
    "the attention is used, too": (
        "attention_quant",
        "is used elsewhere, by output",
        lambda a, r: ((y := attend(a)), fp8(y.flatten(1))),
    ),
    "quantized by heads": (
        "attention_quant",
        r"operand 0 of static_quant_fp8.* is bfloat16\[8, 4, 16\], not bfloat16\[8, 64\]",
        lambda a, r: (fp8(attend(a)),),
    ),
    "a scale for each token": (
        "attention_quant",
        "no kernel for it: opweave_c: out_scale: 8 elements",
        lambda a, r: (o.static_quant_fp8(attend(a).flatten(1), SCALE.repeat(T)[:, None]),),
    ),
    "its own result is an argument": (
        "fused_add_rms_norm",
        "needs its result",
        lambda a, r: ((s := a + r), o.rms_norm(s, s.sum(0), 1e-5)),
    ),
    "its own result is an argument, as it is": (
        "fused_add_rms_norm",
        "needs its result",
        lambda a, r: ((s := a[0] + r[0]), o.rms_norm(s, s, 1e-5)),
    ),
}


@pytest.mark.parametrize("miss", sorted(MISSES))
def test_near_misses_say_what_is_in_the_way(miss: str) -> None:
    composite, reason, function = MISSES[miss]
    fusions = fused(function, x(), x())
    assert composite not in names(fusions)
    reasons = [f.reason for f in fusions if f.op == composite and f.outcome == "rejected"]
    assert reasons, fusions
    assert any(re.search(reason, text) for text in reasons), reasons


@pytest.mark.parametrize("entry", ["aten!", "native!"])
def test_a_part_that_must_run_is_not_replaced(entry: str) -> None:
    def function(a: Tensor, r: Tensor) -> Any:
        return (o.rms_norm(a + r, W, 1e-5),)

    with ir.priority(rms_norm=[entry]):
        (miss,) = fused(function, x(), x())
    assert re.match(f"rms_norm must run {entry} \\[scope ir.priority", miss.reason)
    (node,) = opweave.compile.report().nodes
    assert f"{node.op}={node.chosen}!" == f"rms_norm={entry}"


def test_a_part_that_must_run_and_cannot_is_an_error() -> None:
    def function(a: Tensor, r: Tensor) -> Any:
        return (o.rms_norm(a + r, W, 1e-5),)

    with (
        ir.priority(rms_norm=["aten!"]),
        ir.require("batch_invariant"),
        pytest.raises(Exception, match=r"aten.*batch_invariant"),
    ):
        compiled(function)(x(), x())


@pytest.mark.parametrize("function", [o.rms_norm.using("aten"), torch.autocast("cpu")(o.rms_norm)])
def test_one_part_alone_is_no_near_miss(function: Any) -> None:
    assert fused(lambda a: (function(a.float(), None, 1e-5),), x()) == []


def test_a_longer_chain_keeps_its_ops() -> None:
    """Norms and rotation are one kernel; the cache that follows does not take the rotation away."""

    def function(a: Tensor, r: Tensor) -> Any:
        q, k = (o.rms_norm(t.view(T, -1, 16), None, 1e-6).flatten(1) for t in (a, r[:, :32]))
        return rotate_and_write(q, k, r[:, 32:])

    assert names(fused(function, x(), x())) == ["qk_norm_rope"]


def test_a_cache_is_written_in_place() -> None:
    """A layer of a model: one projection, the donated cache, attention, quantization."""

    def function(qkv: Tensor, keys: Tensor, values: Tensor) -> Any:
        q, k, v = (qkv * 2).split((64, 32, 32), -1)
        q, k = o.rotary_embedding.maybe_inplace(q, k, POSITIONS, CACHE, 16)
        k, v = k.view(T, 2, 16), v.view(T, 2, 16)
        keys, values = o.reshape_and_cache.maybe_inplace(k, v, keys, values, SLOTS)
        y = o.paged_attention(q.view(T, 4, 16), keys, values, *SEQUENCE, 0.25)
        return o.static_quant_fp8(y.flatten(1), SCALE), keys, values

    qkv, caches = x(T, 128), CACHES.clone()
    expected = function(qkv, *CACHES.clone())
    run = compiled(function)
    found = run(qkv, *caches)
    assert names(opweave.compile.report().fusions) == ["attention_quant", "rope_reshape_and_cache"]
    assert found[1].data_ptr() == caches[0].data_ptr()
    assert found[2].data_ptr() == caches[1].data_ptr()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_nothing_is_fused_without_a_kernel_or_with_the_option() -> None:
    _, function = FORMS["add, norm and static fp8"]
    assert fused(function, x(), x(), fusion=False) == []
    with ir.priority(all_native()):
        assert fused(function, x(), x()) == []


def test_fusion_keeps_donations() -> None:
    def function(a: Tensor, r: Tensor) -> Any:
        y, s = o.fused_add_rms_norm.maybe_inplace(a * 2, r, W, 1e-5)
        return o.static_quant_fp8(y, SCALE), s

    a, r = x(), x()
    expected = function(a, r.clone())
    run = compiled(function)
    for found, wanted in zip(run(a, r), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_sizes_may_vary() -> None:
    def function(a: Tensor, r: Tensor) -> Tensor:
        return o.rms_norm(a + r, W, 1e-5)

    run = compiled(function, dynamic=True)
    for tokens in (3, 5):
        a, r = x(tokens, H), x(tokens, H)
        torch.testing.assert_close(run(a, r), function(a, r), atol=2e-2, rtol=2e-2)
    assert names(opweave.compile.report().fusions) == ["fused_add_rms_norm"]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_the_data_tells() -> None:
    def function(a: Tensor, r: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return o.rms_norm(a[first] + r[second].sum(0, keepdim=True), W, 1e-5)

    run = compiled(function)
    masks = torch.arange(T) < 3, torch.arange(T) < 5
    a, r = x(), x()
    torch.testing.assert_close(run(a, r, *masks), function(a, r, *masks), atol=2e-2, rtol=2e-2)
    assert names(opweave.compile.report().fusions) == []


def test_the_table() -> None:
    table = fusion_table()
    assert {row.composite for row in table} >= {composite for composite, _ in FORMS.values()}
    assert not [row for row in table if row.failure]
    forms = {row.composite: 0 for row in table}
    for row in table:
        forms[row.composite] += 1
    assert forms["fused_add_rms_norm"] == 1
    assert forms["fused_add_rms_norm_static_quant_fp8"] == 2, "as written, and written out"


# Composites of a user: declare the composite, register a kernel.


@pytest.fixture
def own_ops() -> Iterator[None]:
    with ir.isolated_registry():

        @ir.register_op(native_traits=["rowwise"])
        def shifted(x: Tensor, n: int = 1) -> Tensor:
            return x + n

        @ir.register_op
        def scaled(x: Tensor, by: float) -> Tensor:
            return x * by

        @ir.register_op
        def two(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return x + z, x * z

        @ir.register_op
        def join(x: Tensor, z: Tensor) -> Tensor:
            return x - 2 * z

        @ir.register_op
        def clip(x: Tensor) -> Tensor:
            return x * 1

        yield


def scaled_twice(x: Tensor, first: float, second: float) -> Tensor:
    return o.scaled(o.scaled(x, first), second)


def shifted_and_clipped(x: Tensor) -> Tensor:
    return o.shifted(x).clip(-1, 1)  # the method, although there is an op of this name


def joined(x: Tensor, z: Tensor) -> Tensor:
    return o.join(*o.two(x, z))


def stacked(x: Tensor, z: Tensor) -> Tensor:
    return torch.cat([o.shifted(x), z]) * x.sum() * z.sum()


def signed(x: Tensor) -> Tensor:
    return torch.copysign(o.shifted(x), 0.0)


def added_twice(x: Tensor, z: Tensor) -> Tensor:
    return torch.add(o.shifted(x), z, alpha=2)


def added(x: Tensor, z: Tensor) -> Tensor:
    return o.shifted(x) + z


def doubled(x: Tensor, n: int) -> Tensor:
    return o.shifted(x, n) * 2


def moved(x: Tensor, kind: str = "add") -> Tensor:
    return o.shifted(x) + 1 if kind == "add" else o.shifted(x) - 1


# The arguments besides x of each composite, to trace it with.
OTHERS: dict[Callable[..., Tensor], tuple[Any, ...]] = {
    scaled_twice: (2.0, 3.0),
    shifted_and_clipped: (),
    joined: (torch.randn(4, 8),),
    stacked: (torch.randn(4, 8),),
    signed: (),
    added_twice: (torch.randn(4, 8),),
    added: (torch.randn(4, 8),),
    doubled: (2,),
    moved: ("sub",),
}
# Programs, and whether they contain the composite; if not, why they do not, where that is reported.
OWN: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], bool, str]] = {
    "as defined": (scaled_twice, lambda x, z: o.scaled(o.scaled(x.sin(), 2.0), 5.0), True, ""),
    "the name of a method": (shifted_and_clipped, lambda x, z: o.shifted(x).clip(-1, 1), True, ""),
    "both parts": (joined, lambda x, z: o.join(*o.two(x, z)), True, ""),
    "the second part twice": (joined, lambda x, z: o.join(*o.two(x, z)[1:] * 2), False, ""),
    "the first part twice": (joined, lambda x, z: o.join(*o.two(x, z)[:1] * 2), False, ""),
    "parts swapped": (joined, lambda x, z: o.join(*o.two(x, z)[::-1]), False, ""),
    "parts of two calls": (
        joined, lambda x, z: o.join(o.two(x, z)[0], o.two(z, x)[1]), False, "",
    ),
    "one input for two parameters": (joined, lambda x, z: o.join(*o.two(x, x)), True, ""),
    "a list": (stacked, stacked, True, ""),
    "a list, swapped": (
        stacked, lambda x, z: torch.cat([z, o.shifted(x)]) * x.sum() * z.sum(), False, "",
    ),
    "a list, one twice": (
        stacked, lambda x, z: torch.cat([o.shifted(x)] * 2) * x.sum() * z.sum(), False, "",
    ),
    "a list, another tensor": (
        stacked, lambda x, z: torch.cat([o.shifted(x), x]) * x.sum() * z.sum(), False, "",
    ),
    "zero": (signed, lambda x, z: torch.copysign(o.shifted(x), 0.0), True, ""),
    "negative zero": (signed, lambda x, z: torch.copysign(o.shifted(x), -0.0), False, ""),
    "alpha": (added_twice, lambda x, z: torch.add(z, o.shifted(x), alpha=2), False, ""),
    "broadcast": (
        added, lambda x, z: o.shifted(x).unsqueeze(1) + torch.stack([z] * 4), False,
        r"operand 0 of add is float32\[4, 1, 8\], not float32\[4, 8\]",
    ),
    "constant": (doubled, lambda x, z: o.shifted(x, 3) * 3, False, r"operand \d of mul"),
    "mode": (
        moved, lambda x, z: o.shifted(x) - 1, False,
        r"sub is aten\.sub\.Tensor, not aten\.add\.Tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_composites_of_a_user(own_ops: None, name: str) -> None:
    native, program, matches, reason = OWN[name]

    op = ir.register_op(native, composite=True)
    op.register_input_generator(lambda num_tokens=4: (torch.randn(4, 8), *OTHERS[native]))
    op.register_impl("ours")(native)
    op.set_default(["ours"])
    assert [row.failure for row in fusion_table() if row.composite == op.name] == [""]
    reports = fused(lambda x, z: (program(x, z),), *torch.randn(2, 4, 8))
    assert names(reports) == [op.name] * matches
    assert not reason or any(re.search(reason, report.reason) for report in reports), reports


def with_constant(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0]).repeat(4)


def with_random_numbers(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def with_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        (with_constant, "contains the constant tensor"),
        (with_random_numbers, "draws random numbers"),
        (with_argument, "returns its argument"),
    ],
)
def test_a_definition_that_cannot_be_compared(native: Callable[..., Any], reason: str) -> None:
    with ir.isolated_registry():
        op = ir.register_op(native, composite=True)
        op.register_input_generator(lambda num_tokens=4: (torch.randn(num_tokens, 8),))
        (row,) = [row for row in fusion_table() if row.composite == op.name]
    assert reason in row.failure
