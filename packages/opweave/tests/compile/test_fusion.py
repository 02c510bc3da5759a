"""The fusion table: each composite, in each form, in a model that contains it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir
from opweave.compile import fusion_table
from opweave.compile.report import MatchReport

from .conftest import all_native

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


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = o.rotary_embedding(q, k, POSITIONS, CACHE, 16, *options)
    k, v = k.view(T, 2, 16), v.view(T, 2, 16)
    return q, *o.reshape_and_cache(k, v, CACHES[0], CACHES[1], SLOTS)


def attend(q: Tensor, *options: Any) -> Tensor:
    found: Tensor = o.paged_attention(q.view(T, 4, 16), CACHES[0], CACHES[1], *SEQUENCE, *options)
    return found


def fused(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[MatchReport]:
    """Compile, compare with eager, and return what fusion did."""
    expected = function(*inputs)
    torch.compiler.reset()
    compiled = torch.compile(
        function,
        backend=opweave.compile.backend,
        fullgraph=True,
        options={"codegen": False, **options},
    )
    found = compiled(*inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2e-2)
        assert x.shape == y.shape
    return opweave.compile.report().fusions


def names(fusions: list[MatchReport]) -> list[str]:
    return sorted(f.op for f in fusions if f.outcome == "fused")


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (T, H))).to(BF16)


FORMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add and norm": ("fused_add_rms_norm", lambda a, r: (o.rms_norm(a + r, W, 1e-5), a + r)),
    "add and norm, commuted": (
        "fused_add_rms_norm",
        lambda a, r: ((s := r + a), o.rms_norm(s, W, epsilon=1e-6)),
    ),
    "add and norm, no weight, keyword": (
        "fused_add_rms_norm",
        lambda a, r: (o.rms_norm(a + r, weight=None, epsilon=1e-5, variance_size=None),),
    ),
    "norm and static fp8": (
        "rms_norm_static_quant_fp8",
        lambda a, r: (o.static_quant_fp8(o.rms_norm(a, W, 1e-5), SCALE), r),
    ),
    "norm and per-token fp8": (
        "rms_norm_dynamic_per_token_quant_fp8",
        lambda a, r: o.dynamic_per_token_quant_fp8(o.rms_norm(a, None, 1e-5)),
    ),
    "norm and per-token int8": (
        "rms_norm_dynamic_per_token_quant_int8",
        lambda a, r: o.dynamic_per_token_quant_int8(o.rms_norm(a, W, 1e-5)),
    ),
    "add, norm and static fp8": (
        "fused_add_rms_norm_static_quant_fp8",
        lambda a, r: (o.static_quant_fp8(o.rms_norm(a + r, W, 1e-5), SCALE), a + r),
    ),
    "composite and static fp8": (
        "fused_add_rms_norm_static_quant_fp8",
        lambda a, r: (
            (p := o.fused_add_rms_norm(a, r, W, 1e-5)) and o.static_quant_fp8(p[0], SCALE),
            p[1],
        ),
    ),
    "add, norm and per-token fp8": (
        "fused_add_rms_norm_dynamic_per_token_quant_fp8",
        lambda a, r: (*o.dynamic_per_token_quant_fp8(o.rms_norm(a + r, W, 1e-5)), a + r),
    ),
    "silu and static fp8": (
        "silu_and_mul_static_quant_fp8",
        lambda a, r: (o.static_quant_fp8(o.silu_and_mul(a), SCALE),),
    ),
    "silu and groups, through views": (
        "silu_and_mul_per_token_group_quant_fp8",
        lambda a, r: o.per_token_group_quant_fp8(
            o.silu_and_mul(a.view(2, T // 2, H)).view(T, H // 2), 16
        ),
    ),
    "norms and rotation": (
        "qk_norm_rope",
        lambda a, r: o.rotary_embedding(
            o.rms_norm(a.view(T, 4, 16), W[:16], 1e-6).view(T, H),
            o.rms_norm(r.view(T, 4, 16), W[16:32], 1e-6).view(T, H),
            POSITIONS,
            CACHE,
            16,
        ),
    ),
    "norms and rotation, interleaved": (
        "qk_norm_rope",
        lambda a, r: o.rotary_embedding(
            o.rms_norm(a.view(T, 4, 16), W[:16], 1e-6).view(T, H),
            o.rms_norm(r.view(T, 4, 16), W[16:32], 1e-6).view(T, H),
            POSITIONS,
            CACHE,
            16,
            False,
        ),
    ),
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
        lambda a, r: (
            (p := o.rotary_embedding(a, r[:, :32], POSITIONS, CACHE, 16)) and p[0] * 2,
            *o.reshape_and_cache(
                p[1].view(T, 2, 16), r[:, 32:].view(T, 2, 16), CACHES[0], CACHES[1], SLOTS
            ),
        ),
    ),
    "attention and static fp8": (
        "attention_quant",
        lambda a, r: (o.static_quant_fp8(attend(a).view(T, H), SCALE),),
    ),
    "attention and static fp8, with options": (
        "attention_quant",
        lambda a, r: (o.static_quant_fp8(attend(a, 0.3, True, 5, 8.0).flatten(1), SCALE),),
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
        lambda a, r: ((n := o.rms_norm(a, W, 1e-5)), o.static_quant_fp8(n, SCALE)),
    ),
    "something stands between": (
        "fused_add_rms_norm_static_quant_fp8",
        "operand 0 of .* is aten.mul.Tensor, not aten.add.Tensor",
        lambda a, r: ((n := o.rms_norm(a * r, W, 1e-5)), o.static_quant_fp8(n, SCALE)),
    ),
    "no kernel takes the arguments": (
        "fused_add_rms_norm",
        "no kernel for it: opweave_c: .*float64",
        lambda a, r: (o.rms_norm(a.double() + r.double(), None, 1e-5),),
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
        lambda a, r: o.rotary_embedding(
            o.rms_norm(a.view(T, 4, 16), W[:16], 1e-6).view(T, H),
            o.rms_norm(r.view(T, 4, 16), W[16:32], 1e-5).view(T, H),
            POSITIONS,
            CACHE,
            16,
        ),
    ),
    "the rotated keys are returned": (
        "rope_reshape_and_cache",
        "is used elsewhere, by output",
        lambda a, r: (
            (p := o.rotary_embedding(a, r[:, :32], POSITIONS, CACHE, 16))[1],
            *o.reshape_and_cache(
                p[1].view(T, 2, 16), r[:, 32:].view(T, 2, 16), CACHES[0], CACHES[1], SLOTS
            ),
        ),
    ),
    "the cache has other heads": (
        "rope_reshape_and_cache",
        "rope_reshape_and_cache does not take these arguments: .*key must be|not bfloat16",
        lambda a, r: (
            (p := o.rotary_embedding(a, r[:, :32], POSITIONS, CACHE, 16))[0],
            *o.reshape_and_cache(
                p[1].view(T, 1, 32),
                r[:, 32:].view(T, 1, 32),
                CACHES[0].view(3, 1, 16, 32),
                CACHES[1].view(3, 1, 16, 32),
                SLOTS,
            ),
        ),
    ),
    "the attention is used, too": (
        "attention_quant",
        "is used elsewhere, by output",
        lambda a, r: ((y := attend(a)), o.static_quant_fp8(y.flatten(1), SCALE)),
    ),
    "quantized by heads": (
        "attention_quant",
        r"operand 0 of static_quant_fp8.* is bfloat16\[8, 4, 16\], not bfloat16\[8, 64\]",
        lambda a, r: (o.static_quant_fp8(attend(a), SCALE),),
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

    compiled = torch.compile(function, backend=opweave.compile.backend)
    with (
        ir.priority(rms_norm=["aten!"]),
        ir.require("batch_invariant"),
        pytest.raises(Exception, match=r"aten.*batch_invariant"),
    ):
        compiled(x(), x())


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
    compiled = torch.compile(function, backend=opweave.compile.backend, options={"codegen": False})
    found = compiled(qkv, *caches)
    assert names(opweave.compile.report().fusions) == ["attention_quant", "rope_reshape_and_cache"]
    assert found[1].data_ptr() == caches[0].data_ptr()
    assert found[2].data_ptr() == caches[1].data_ptr()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_nothing_is_fused_without_a_kernel() -> None:
    _, function = FORMS["add, norm and static fp8"]
    with ir.priority(all_native()):
        assert fused(function, x(), x()) == []


def test_the_option() -> None:
    _, function = FORMS["add, norm and static fp8"]
    assert fused(function, x(), x(), fusion=False) == []


def test_fusion_keeps_donations() -> None:
    def function(a: Tensor, r: Tensor) -> Any:
        y, s = o.fused_add_rms_norm.maybe_inplace(a * 2, r, W, 1e-5)
        return o.static_quant_fp8(y, SCALE), s

    a, r = x(), x()
    expected = function(a, r.clone())
    compiled = torch.compile(function, backend=opweave.compile.backend, options={"codegen": False})
    for found, wanted in zip(compiled(a, r), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_sizes_may_vary() -> None:
    def function(a: Tensor, r: Tensor) -> Tensor:
        return o.rms_norm(a + r, W, 1e-5)

    compiled = torch.compile(
        function, backend=opweave.compile.backend, dynamic=True, options={"codegen": False}
    )
    for tokens in (3, 5):
        a, r = x(tokens, H), x(tokens, H)
        torch.testing.assert_close(compiled(a, r), function(a, r), atol=2e-2, rtol=2e-2)
    assert names(opweave.compile.report().fusions) == ["fused_add_rms_norm"]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_the_data_tells() -> None:
    def function(a: Tensor, r: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return o.rms_norm(a[first] + r[second].sum(0, keepdim=True), W, 1e-5)

    compiled = torch.compile(function, backend=opweave.compile.backend, options={"codegen": False})
    masks = torch.arange(T) < 3, torch.arange(T) < 5
    a, r = x(), x()
    torch.testing.assert_close(compiled(a, r, *masks), function(a, r, *masks), atol=2e-2, rtol=2e-2)
    assert names(opweave.compile.report().fusions) == []


def test_a_composite_of_ones_own() -> None:
    """Adding a fusion is: declare the composite, register a kernel."""
    with ir.isolated_registry():

        @ir.register_op
        def scaled(x: Tensor, by: float) -> Tensor:
            return x * by

        @ir.register_op(composite=True)
        def scaled_twice(x: Tensor, first: float, second: float) -> Tensor:
            return scaled(scaled(x, first), second)

        @scaled_twice.register_input_generator
        def _(num_tokens: int = 4) -> tuple[Tensor, float, float]:
            return torch.randn(num_tokens, 3), 2.0, 3.0

        @scaled_twice.register_impl("ours")
        def _(x: Tensor, first: float, second: float) -> Tensor:
            return x * (first * second)

        scaled_twice.set_default(["ours"])
        found = fused(lambda t: (scaled(scaled(t.sin(), 2.0), 5.0),), torch.randn(3, 3))
    assert names(found) == ["scaled_twice"]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("alpha", None),
        ("broadcast", r"operand 0 of add is float32\[4, 1, 8\], not float32\[4, 8\]"),
        ("constant", r"operand \d of mul"),
        ("mode", r"sub is aten\.sub\.Tensor, not aten\.add\.Tensor"),
    ],
)
def test_what_looks_like_a_composite(form: str, reason: str | None) -> None:
    """Nothing is fused whose operands, numbers or ops are others than the composite's."""
    inputs = torch.randn(4, 8), torch.randn(4, 4, 8) if form == "broadcast" else torch.randn(4, 8)
    with ir.isolated_registry():

        @ir.register_op(native_traits=["rowwise"])
        def shifted(x: Tensor, n: int) -> Tensor:
            return x + n

        def declare(native: Any, other: Any = None) -> None:
            def inputs(num_tokens: int = 4) -> tuple[Any, ...]:
                rows = torch.randn(2, num_tokens, 8)
                return rows[0], rows[1] if other is None else other

            op = ir.register_op(native, name=f"composite_{form}", composite=True)
            op.register_input_generator(inputs)
            op.register_impl("ours")(native)
            op.set_default(["ours"])
            assert [row.failure for row in fusion_table() if row.composite == op.name] == [""]

        def alpha(x: Tensor, y: Tensor) -> Tensor:
            return torch.add(shifted(x, 1), y, alpha=2)

        def broadcast(x: Tensor, y: Tensor) -> Tensor:
            return shifted(x, 1) + y

        def constant(x: Tensor, n: int) -> Tensor:
            return shifted(x, n) * 2

        def mode(x: Tensor, kind: str = "add") -> Tensor:
            return shifted(x, 1) + 1 if kind == "add" else shifted(x, 1) - 1

        if form == "alpha":
            declare(alpha)
            found = fused(lambda x, y: (torch.add(y, shifted(x, 1), alpha=2),), *inputs)
        elif form == "broadcast":
            declare(broadcast)
            found = fused(lambda x, y: (shifted(x, 1).unsqueeze(1) + y,), *inputs)
        elif form == "constant":
            declare(constant, 2)
            found = fused(lambda x, y: (shifted(x, 3) * 3,), *inputs)
        else:
            declare(mode, "sub")
            found = fused(lambda x, y: (shifted(x, 1) - 1,), *inputs)
    assert names(found) == []
    assert reason is None or any(re.search(reason, f.reason) for f in found), found


def test_an_op_with_the_name_of_a_method() -> None:
    """A composite may use the method, whether the op is in the graph or not."""
    with ir.isolated_registry():

        @ir.register_op
        def clip(x: Tensor) -> Tensor:
            return x * 1

        @ir.register_op
        def shifted(x: Tensor) -> Tensor:
            return x + 1

        def shifted_and_clipped(x: Tensor) -> Tensor:
            return shifted(x).clip(-1, 1)

        op = ir.register_op(shifted_and_clipped, composite=True)
        op.register_input_generator(lambda num_tokens=4: (torch.randn(num_tokens),))
        op.register_impl("ours")(lambda x: (x + 1).clip(-1, 1))
        op.set_default(["ours"])
        found = fused(lambda x: (shifted(x).clip(-1, 1),), torch.randn(6))
    assert names(found) == ["shifted_and_clipped"]


def test_the_table() -> None:
    table = fusion_table()
    assert {row.composite for row in table} >= {composite for composite, _ in FORMS.values()}
    assert not [row for row in table if row.failure]
    forms = {row.composite: 0 for row in table}
    for row in table:
        forms[row.composite] += 1
    assert forms["fused_add_rms_norm"] == 1
    assert forms["fused_add_rms_norm_static_quant_fp8"] == 2, "as written, and written out"


def _declared(native: Callable[..., Any], *inputs: Any) -> None:
    """Register *native* as a composite with a kernel that computes the same."""
    op = ir.register_op(native, composite=True)
    op.register_input_generator(lambda num_tokens=4: inputs)
    op.register_impl("ours")(native)
    op.set_default(["ours"])


VALUES = {
    "both parts": (lambda two, join, x, z: join(*two(x, z)), True),
    "the second part twice": (lambda two, join, x, z: join(*two(x, z)[1:] * 2), False),
    "the first part twice": (lambda two, join, x, z: join(*two(x, z)[:1] * 2), False),
    "parts swapped": (lambda two, join, x, z: join(*two(x, z)[::-1]), False),
    "parts of two calls": (lambda two, join, x, z: join(two(x, z)[0], two(z, x)[1]), False),
    "one input for two parameters": (lambda two, join, x, z: join(*two(x, x)), True),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_match_binds_the_parts_of_a_tuple(name: str) -> None:
    function, matches = VALUES[name]
    with ir.isolated_registry():

        @ir.register_op
        def two(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return x + z, x * z

        @ir.register_op
        def join(x: Tensor, z: Tensor) -> Tensor:
            return x - 2 * z

        def joined(x: Tensor, z: Tensor) -> Tensor:
            result: Tensor = join(*two(x, z))
            return result

        _declared(joined, torch.randn(4, 8), torch.randn(4, 8))
        reports = fused(lambda x, z: (function(two, join, x, z),), *torch.randn(2, 4, 8))
    assert names(reports) == ["joined"] * matches


LISTS = {
    "as defined": (lambda shifted, x, z: torch.cat([shifted(x), z]) * x.sum() * z.sum(), True),
    "swapped": (lambda shifted, x, z: torch.cat([z, shifted(x)]) * x.sum() * z.sum(), False),
    "one twice": (lambda shifted, x, z: torch.cat([shifted(x)] * 2) * x.sum() * z.sum(), False),
    "another tensor": (lambda shifted, x, z: torch.cat([shifted(x), x]) * x.sum() * z.sum(), False),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_match_binds_the_tensors_in_a_list(name: str) -> None:
    function, matches = LISTS[name]
    with ir.isolated_registry():

        @ir.register_op
        def shifted(x: Tensor) -> Tensor:
            return x + 1

        def stacked(x: Tensor, z: Tensor) -> Tensor:
            return torch.cat([shifted(x), z]) * x.sum() * z.sum()

        _declared(stacked, torch.randn(4, 8), torch.randn(4, 8))
        reports = fused(lambda x, z: (function(shifted, x, z),), *torch.randn(2, 4, 8))
    assert names(reports) == ["stacked"] * matches


@pytest.mark.parametrize(("zero", "matches"), [(0.0, True), (-0.0, False)])
def test_a_negative_zero_is_another_constant(zero: float, matches: bool) -> None:
    with ir.isolated_registry():

        @ir.register_op
        def shifted(x: Tensor) -> Tensor:
            return x + 1

        def signed(x: Tensor) -> Tensor:
            return torch.copysign(shifted(x), 0.0)

        _declared(signed, torch.randn(4, 8))
        reports = fused(lambda x: (torch.copysign(shifted(x), zero),), torch.randn(4, 8))
    assert names(reports) == ["signed"] * matches


@pytest.mark.parametrize("form", ["constant", "random", "argument"])
def test_a_definition_that_cannot_be_compared(form: str) -> None:
    """It has values besides its arguments, or returns one of them."""
    natives: dict[str, tuple[Callable[[Tensor], Any], str]] = {
        "constant": (
            lambda x: x * torch.tensor([1.0, 2.0]).repeat(4),
            "contains the constant tensor",
        ),
        "random": (lambda x: x + torch.rand_like(x), "draws random numbers"),
        "argument": (lambda x: (x + 1, x), "returns its argument"),
    }
    function, reason = natives[form]

    def one(x: Tensor) -> Tensor:
        result: Tensor = function(x)
        return result

    def several(x: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = function(x)
        return result

    with ir.isolated_registry():
        op = ir.register_op(several if form == "argument" else one, composite=True)
        op.register_input_generator(lambda num_tokens=4: (torch.randn(num_tokens, 8),))
        (row,) = [row for row in fusion_table() if row.composite == op.name]
    assert reason in row.failure
