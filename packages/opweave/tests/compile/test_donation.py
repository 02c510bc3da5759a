"""Donation: what is given up may be reused, and reading it afterwards is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opweave.compile
from opweave import ir
from opweave.compile import Report

from .blocks import Model, OpCalls, model_inputs
from .conftest import compiled

WEIGHT = torch.ones(8)
add_norm = ir.ops.fused_add_rms_norm


def reads_the_tensor(x: Tensor, r: Tensor) -> Any:
    y, _ = add_norm.maybe_inplace(x * 1, r, WEIGHT, 1e-5)
    return y + r  # read


def reads_a_view(x: Tensor, r: Tensor) -> Any:
    seen = r.view(-1)
    y, _ = add_norm.maybe_inplace(x * 1, r, WEIGHT, epsilon=1e-5)
    return y.sum() + seen[3]  # read


def reads_the_base(x: Tensor, r: Tensor) -> Any:
    base = x * 2
    y, _ = add_norm.maybe_inplace(base[1:], r[1:].clone(), WEIGHT, 1e-5)
    return y.sum() + base.sum()  # read


def donates_twice(x: Tensor, r: Tensor) -> Any:
    add_norm.maybe_inplace(x.clone(), r, WEIGHT, 1e-5)
    return add_norm.maybe_inplace(x.clone(), r, WEIGHT, 1e-5)  # read


def call_site(x: Tensor, r: Tensor) -> Any:
    y, _ = add_norm.using("native").maybe_inplace(x.clone(), x_residual=r, weight=None, epsilon=1.0)
    return y * r  # read


def copies_it_next_to_it(x: Tensor, r: Tensor) -> Any:
    both = torch.cat((x, r), -1)
    y, _ = add_norm.maybe_inplace(both[:, :8], r.clone(), WEIGHT, 1e-5)
    both[:, 8:].copy_(both[:, :8])  # read
    return y


def returns_it(x: Tensor, r: Tensor) -> Any:
    donated = r * 2
    return add_norm.maybe_inplace(x * 1, donated, WEIGHT, 1e-5)[0], donated


READERS = [
    reads_the_tensor, reads_a_view, reads_the_base, donates_twice, call_site,
    copies_it_next_to_it, returns_it,
]  # fmt: skip


@pytest.mark.parametrize("function", READERS)
def test_reading_what_was_given_up_names_both_lines(function: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="used again") as caught:
        compiled(function)(torch.randn(4, 8), torch.randn(4, 8))
    text = str(caught.value)
    first = function.__code__.co_firstlineno
    lines = [int(n) for n in re.findall(r"test_donation\.py:(\d+)", text)]
    assert len(lines) == 2 or "it is returned" in text, text
    assert first < lines[0] <= lines[-1]
    assert "maybe_inplace" in text.split("donated:")[1].split("\n")[0]
    assert "Call fused_add_rms_norm instead" in text


rotate = ir.ops.rotary_embedding
TABLE = torch.linspace(0, 3, 16 * 8).sin().view(16, 8)


def apart(x: Tensor) -> Any:
    q, k, v = (x * 1).split(16, -1)
    q, k = rotate.maybe_inplace(q, k, torch.arange(4), TABLE, 8)
    return q * 1, k * 1, v * 2


def values_are_transposed(x: Tensor) -> Any:
    q, k, v = (x * 1).split(16, -1)
    q, k = rotate.maybe_inplace(q, k, torch.arange(4), TABLE, 8)
    return q * 1, k * 1, v.view(4, 2, 8).transpose(0, 1) * 2


def a_range_of_rows_at_a_time(x: Tensor) -> Any:
    q, k, v = (x * 1).split(16, -1)
    at = torch.arange(4)
    first = rotate.maybe_inplace(q[:2], k[:2], at[:2], TABLE, 8)
    return *first, *rotate.maybe_inplace(q[2:], k[2:], at[2:], TABLE, 8), v * 2


def every_other_row(x: Tensor) -> Any:
    wide = x * 1
    y, s = add_norm.maybe_inplace(wide[::2, :8], wide[1::2, :8], WEIGHT, 1e-5)
    return y * 1, s * 1, wide[:, 8:].t() * 1


def asks_for_sizes(x: Tensor) -> Any:
    q, k, v = (x * 1).split(16, -1)
    a, b = rotate.maybe_inplace(q, k, torch.arange(x.shape[0]), TABLE, 8)
    return a.view(q.shape[0], 2, 8) * 1, b.view(k.size()) * q.numel(), v.sum() * q.stride(0)


def views_are_not_reads(x: Tensor) -> Any:
    h = x * 1
    y, _ = add_norm.maybe_inplace(h[:, :8], h[:, 8:16] + 1, WEIGHT, 1e-5)
    return y * 1, h.view(4, 6, 8)[:, 2:] * 1


NEIGHBORS = [
    apart, values_are_transposed, a_range_of_rows_at_a_time, every_other_row, asks_for_sizes,
    views_are_not_reads,
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", NEIGHBORS)
def test_memory_next_to_what_was_given_up_may_be_read(
    function: Callable[..., Any], dynamic: bool
) -> None:
    run = compiled(function, dynamic=dynamic)
    x = torch.randn(4, 48)
    torch.testing.assert_close(tuple(run(x)), tuple(function(x)))
    report = opweave.compile.report()
    assert {node.chosen for node in report.nodes} == {"opweave_c"}
    assert not [c for c in copies(report) if "shares memory" in c]


def test_a_donated_input_is_reused_and_no_other_changes() -> None:
    def function(x: Tensor, r: Tensor) -> Any:
        return add_norm.maybe_inplace(x * 2, r, WEIGHT, 1e-5)

    x, r = torch.randn(4, 8), torch.randn(4, 8)
    expected, kept = function(x, r.clone()), x.clone()
    y, s = compiled(function)(x, r)
    torch.testing.assert_close((y, s), tuple(expected))
    assert s.data_ptr() == r.data_ptr()
    assert torch.equal(x, kept)


def test_donated_inputs_that_overlap_are_copied_first() -> None:
    def function(x: Tensor, r: Tensor) -> Any:
        return add_norm.maybe_inplace(x, r, WEIGHT, 1e-5)

    run = compiled(function)
    run(torch.randn(4, 8), torch.randn(4, 8))  # compiled for inputs that are apart
    base = torch.randn(5, 8)
    expected = add_norm(base[:4].clone(), base[1:].clone(), WEIGHT, 1e-5)
    found = run(base[:4], base[1:])
    torch.testing.assert_close(tuple(found), tuple(expected))


@pytest.mark.parametrize("codegen", [False, True])
def test_a_donated_slice_is_all_that_is_given_up(codegen: bool) -> None:
    def function(x: Tensor) -> Any:
        first, rest = x[:2], x[2:]
        donated = add_norm.maybe_inplace(first, rest + 1, WEIGHT, 1e-5)
        return *donated, *add_norm(rest, donated[1] + 1, WEIGHT, 1e-5), x[2:] * 2

    x = torch.randn(4, 8)
    kept, expected = x.clone(), function(x.clone())
    torch.testing.assert_close(tuple(compiled(function, codegen=codegen)(x)), tuple(expected))
    assert torch.equal(x[2:], kept[2:])


@pytest.fixture
def scale() -> Any:
    """An op whose kernel writes into its argument, of any dtype."""
    with ir.isolated_registry():

        @ir.register_op(allow_inplace=True)
        def scale(x: Tensor, by: Tensor) -> Tensor:
            return x * by

        @scale.register_impl("in_place", inplace=True)
        def _(x: Tensor, by: Tensor) -> Tensor:
            return x.mul_(by)

        scale.set_default(["in_place"])
        yield scale


def test_memory_that_may_be_shared_is_copied(scale: ir.IrOp) -> None:
    def function(x: Tensor) -> Any:
        memory = x * 1
        donated, kept = (memory.as_strided((3, 3), (7, 3), start) for start in (0, 2))
        return scale.maybe_inplace(donated, x[0]), kept * 2

    x = torch.randn(40)
    expected = tuple(function(x.clone()))
    torch.testing.assert_close(tuple(compiled(function)(x)), expected)
    assert len(copies(opweave.compile.report())) == 1


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("codegen", [False, True])
def test_views_of_another_type_share_memory(scale: ir.IrOp, codegen: bool) -> None:
    def function(x: Tensor) -> Any:
        h = x.exp()
        parts = torch.view_as_real(h)[32:]
        return scale(h, parts.sum()), parts * 2

    x = torch.randn(64, dtype=torch.complex64)
    found = compiled(function, codegen=codegen)(x)
    torch.testing.assert_close(tuple(found), tuple(function(x)))


def test_views_of_another_type_share_memory_in_eager_mode(scale: ir.IrOp) -> None:
    half = torch.randn(64).half()
    by = half.view(torch.int16)[60:].view(torch.float16)[:1]
    wanted = half.clone() * by.clone()
    assert torch.equal(scale.maybe_inplace(half, by), wanted)


def overlapping_inputs() -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    def memory() -> Tensor:
        return torch.linspace(-1, 1, 48).view(6, 8)

    def of_one_tensor() -> tuple[Tensor, Tensor]:
        x = memory()
        return x[:4], x[2:]

    def of_storage() -> tuple[Tensor, Tensor]:
        storage = memory().untyped_storage()
        x, y = (torch.empty(0).set_(storage, start, (4, 8), (8, 1)) for start in (0, 16))
        return x, y

    def of_another_dtype() -> tuple[Tensor, Tensor]:
        x = memory()
        return x[:4], x.view(torch.int32)[2:].view(torch.float32)

    def of_doubles() -> tuple[Tensor, Tensor]:
        x = memory().view(torch.float64).view(torch.float32)
        return x[:4], x[2:]

    return {
        "views": of_one_tensor,
        "detached views": lambda: tuple(t.detach() for t in of_one_tensor()),
        "one storage": of_storage,
        "views of another dtype": of_another_dtype,
        "views of views of another dtype": of_doubles,
    }


@pytest.mark.parametrize(
    ("aliases", "apart_first", "codegen"),
    [
        *((name, True, False) for name in overlapping_inputs()),
        ("views", True, True),
        ("views", False, False),
        ("views", False, True),
    ],
)
def test_a_donated_input_that_is_written_and_overlaps(
    scale: ir.IrOp, aliases: str, apart_first: bool, codegen: bool
) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        seen = y * 2
        return seen, scale.maybe_inplace(x, torch.tensor(3.0))

    make, run = overlapping_inputs()[aliases], compiled(function, codegen=codegen)
    if not apart_first:  # AOTAutograd compiles a graph for inputs with these aliases only
        torch.testing.assert_close(tuple(run(*make())), tuple(function(*make())))
        return
    run(torch.randn(4, 8), torch.randn(4, 8))
    for _ in range(2):
        torch.testing.assert_close(tuple(run(*make())), tuple(function(*make())))
    x, y = torch.randn(4, 8), torch.randn(4, 8)  # the compiled graph again
    expected = function(x.clone(), y.clone())
    torch.testing.assert_close(tuple(run(x, y)), tuple(expected))


def test_a_saved_tensor_that_was_given_up_gives_no_wrong_gradient() -> None:
    def function(x: Tensor, r: Tensor) -> Any:
        return add_norm.maybe_inplace(x * 2, r, WEIGHT, 1e-5)

    x, r, factor = torch.randn(4, 8), torch.randn(4, 8), torch.ones(4, 8, requires_grad=True)
    with torch.enable_grad():
        product = (factor * r).sum()
        _, s = compiled(function)(x, r)
    assert s.data_ptr() == r.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("name", ["rotary_embedding", "fused_add_rms_norm"])
def test_strides_are_those_of_eager_mode(name: str) -> None:
    def function(x: Tensor) -> Any:
        a, b, _ = (x * 1).split(16, -1)
        if name == "fused_add_rms_norm":
            return add_norm.maybe_inplace(a, b, None, 1e-5)
        return rotate.maybe_inplace(a, b, torch.arange(4), TABLE, 8)

    x = torch.randn(4, 48)
    found, expected = compiled(function)(x), function(x)
    assert [t.stride() for t in found] == [t.stride() for t in expected] == [(16, 1)] * 2


@pytest.mark.parametrize("codegen", [False, True])
def test_a_cache_is_written_where_it_is_whatever_its_strides(codegen: bool) -> None:
    def function(key: Tensor, value: Tensor, slots: Tensor, caches: Tensor) -> Any:
        return ir.ops.reshape_and_cache.maybe_inplace(key, value, caches[:, 0], caches[:, 1], slots)

    key, value, slots = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.tensor([5, -1, 40])
    caches = torch.randn(4, 2, 2, 16, 8)
    expected = function(key, value, slots, caches.clone())
    found = compiled(function, codegen=codegen)(key, value, slots, caches)
    torch.testing.assert_close(tuple(found), tuple(expected))
    assert [t.data_ptr() for t in found] == [caches[:, i].data_ptr() for i in range(2)]
    assert [t.stride() for t in found] == [caches[:, 0].stride()] * 2


def copies(report: Report) -> list[str]:
    return [
        f"{n.node}.{r.activation}: {r.reason}" for n in report.nodes for r in n.reuse if r.reason
    ]


def test_the_residual_stream_lives_in_one_buffer() -> None:
    model = Model(3, OpCalls())
    inputs = model_inputs(8)
    expected = model(*inputs)
    found = compiled(model)(*inputs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    report = opweave.compile.report()
    assert copies(report) == []
    final = report.passes[-2].after
    kernels = re.findall(r"fused_add_rms_norm\.default\(\w+, (\w+), ", final)
    assert len(kernels) == 7
    assert len(set(kernels)) == 1, "every layer adds to the same residual"
