"""Ops are recognized in graphs of plain PyTorch operators, and only where they are all there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import opweave.compile
from opweave import ir
from opweave.compile.report import Report
from opweave.ir import IrOp
from opweave.ir.op import Spelling

from .conftest import all_native, compiled
from .test_identity import generated

BF16 = torch.bfloat16
H = 64
W, B = torch.randn(H), torch.randn(H)
MATRIX = torch.randn(32, H) / 8


def recognized(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Counter[str]:
    """Compile, compare with eager mode, and count the ops that were recognized."""
    expected = function(*inputs)
    found = compiled(function, **options)(*inputs)
    loose = BF16 in {t.dtype for t in inputs}
    bounds = {"atol": 2e-2, "rtol": 2e-2} if loose else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(found, expected, **bounds)
    return Counter(each.op for each in opweave.compile.report().recognized)


# Spellings


def spellings() -> list[Any]:
    registry = ir.current_registry()
    registry.ensure_ready()
    return [
        pytest.param(op, spelling, id=f"{op.name}-{number}-{spelling.name}")
        for op in registry.ops.values()
        for number, spelling in enumerate(op.spellings)
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, BF16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("op", "spelling"), spellings())
def test_a_spelling_computes_what_the_op_computes(
    op: IrOp, spelling: Spelling, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    generator = spelling.inputs or op.input_generator
    for tokens in (1, 33):
        values = generator(num_tokens=tokens, hidden_size=256, dtype=dtype)
        with ir.priority(all_native()):
            expected = (spelling.call or op)(*values)
        found = spelling.function(*values)
        assert found.dtype == expected.dtype
        bound = op.get_tolerance(dtype)
        torch.testing.assert_close(found, expected, atol=bound.atol, rtol=bound.rtol)
        # A result that is rounded at another place differs in many elements.
        assert dtype is torch.float32 or (found != expected).float().mean() < 0.01


def llama_norm(x: Tensor, weight: Tensor = W) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight.to(x.dtype) * y.to(x.dtype)


def gemma_norm(x: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + W)).type_as(x)


def olmo_norm(x: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = torch.rsqrt(torch.mean(y**2, dim=-1, keepdim=True) + 1e-5) * y
    return (W.to(x.dtype) * y).to(x.dtype)


def silu_of_chunk(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return up * functional.silu(gate)


def linear(x: Tensor) -> Tensor:
    return functional.linear(x, MATRIX.to(x.dtype))


class Linear(nn.Module):
    def __init__(self, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(H, 32, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


SPELLED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "norm of Llama": ("rms_norm", llama_norm),
    "norm of Gemma": ("rms_norm", gemma_norm),
    "norm of OLMo 2": ("rms_norm", olmo_norm),
    "rms_norm of torch": ("rms_norm", lambda x: functional.rms_norm(x, (H,), W.to(x.dtype), 1e-5)),
    "rms_norm without weight": ("rms_norm", lambda x: functional.rms_norm(x, (H,), None, 1e-5)),
    "layer_norm": (
        "layer_norm",
        lambda x: functional.layer_norm(x, (H,), W.to(x.dtype), B.to(x.dtype), 1e-5),
    ),
    "layer_norm without bias": (
        "layer_norm",
        lambda x: functional.layer_norm(x, (H,), W.to(x.dtype)),
    ),
    "layer_norm without weight": ("layer_norm", lambda x: functional.layer_norm(x, (H,))),
    "silu of chunks": ("silu_and_mul", silu_of_chunk),
    "silu of slices": ("silu_and_mul", lambda x: functional.silu(x[..., :32]) * x[..., 32:]),
    "silu of the last half": ("mul_and_silu", lambda x: x[..., :32] * functional.silu(x[..., 32:])),
    "gelu of slices": ("gelu_and_mul", lambda x: functional.gelu(x[..., :32]) * x[..., 32:]),
    "gelu by tanh of slices": (
        "gelu_and_mul",
        lambda x: functional.gelu(x[..., :32], approximate="tanh") * x[..., 32:],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", SPELLED)
def test_it_is_recognized(name: str, dtype: torch.dtype) -> None:
    op, function = SPELLED[name]
    x = torch.randn(2, 3, H).to(dtype)
    assert recognized(function, x) == {op: 1}


@pytest.mark.parametrize(
    ("shape", "bias", "dtype"),
    [
        ((5, H), True, torch.float32),
        ((1, H), False, torch.float32),
        ((2, 3, H), True, BF16),
        ((2, 3, H), False, torch.float32),
        ((H,), True, torch.float32),
        ((H,), False, BF16),
    ],
)
def test_linear_layers_are_recognized(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    assert recognized(Linear(dtype, bias), torch.randn(shape).to(dtype)) == {"linear": 1}


# Unchanged programs


def shared(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.float()
    normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return W * normed, normed.sum(-1)


def mean_of_the_first_dimension(x: Tensor) -> Tensor:
    return W * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5))


def squared_before_the_upcast(x: Tensor) -> Tensor:
    mean = x.pow(2).float().mean(-1, keepdim=True)
    return W.to(x.dtype) * (x.float() * torch.rsqrt(mean + 1e-5)).to(x.dtype)


def rounded_twice(x: Tensor) -> Tensor:
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).half()
    return W.to(x.dtype) * y.to(x.dtype)


def silu_in_float32(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def silu_of_unequal_parts(x: Tensor) -> Tensor:
    return functional.silu(x[..., :32]) * x[..., 16:48]


def computed_weight(x: Tensor) -> Tensor:
    return functional.linear(x, MATRIX.to(x.dtype) * x.sum())


NEAR_MISSES: dict[str, tuple[torch.dtype, Callable[..., Any], str]] = {
    "an inner value is used elsewhere": (torch.float32, shared, "is used elsewhere, by"),
    "another dimension": (torch.float32, mean_of_the_first_dimension, "operand 1 of mean"),
    "squared in bfloat16": (BF16, squared_before_the_upcast, ""),
    "rounded to float16 first": (BF16, rounded_twice, ""),
    "silu in float32": (BF16, silu_in_float32, "its input is widened"),
    "parts that overlap": (torch.float32, silu_of_unequal_parts, " of slice"),
    "a weight that is computed": (torch.float32, computed_weight, "weight is computed, by mul"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone_and_reported(name: str) -> None:
    dtype, function, reason = NEAR_MISSES[name]
    assert recognized(function, torch.randn(6, H).to(dtype)) == {}
    report = opweave.compile.report()
    assert report.nodes == []
    reasons = [each.reason for each in report.unrecognized]
    assert not reason or any(reason in each for each in reasons)
    for each in report.unrecognized:
        assert __file__ in each.source


def shared_layer_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    normed = (x - mean) * torch.rsqrt(variance + 1e-5)
    return normed * W + B, normed.sum(-1)


def test_a_part_of_a_near_miss_is_not_a_near_miss_of_another_op() -> None:
    assert recognized(shared_layer_norm, torch.randn(6, H)) == {}
    (miss,) = opweave.compile.report().unrecognized
    assert miss.op == "layer_norm"
    assert "is used elsewhere" in miss.reason


def unknown(x: Tensor) -> Tensor:
    return torch.softmax(functional.softplus(x).cumsum(-1), -1)


def nothing_recognized(x: Tensor) -> tuple[Any, ...]:
    return shared(x), computed_weight(x), unknown(x)


def native_would_run(x: Tensor) -> tuple[Any, ...]:
    return llama_norm(x), linear(x), silu_of_chunk(x)


@pytest.mark.parametrize("function", [nothing_recognized, native_would_run])
def test_no_line_of_code_differs_where_nothing_is_replaced(function: Callable[..., Any]) -> None:
    x = torch.randn(6, H)
    expected, plain = generated("inductor", function, [x])
    with ir.priority(all_native() if function is native_would_run else {}):
        values, ours = generated("opweave", function, [x])
    assert ours == plain
    torch.testing.assert_close(values, expected, atol=0, rtol=0)


@pytest.mark.parametrize(("tokens", "ops"), [(3, {}), (1024, {"rms_norm": 1})])
def test_generated_code_keeps_small_rowwise_ops(tokens: int, ops: dict[str, int]) -> None:
    x, weight = torch.randn(tokens, 1024), torch.randn(1024)
    assert recognized(llama_norm, x, weight, codegen=True) == ops
    (record,) = [p for p in opweave.compile.report().passes if p.name == "recognize"]
    said = "rms_norm: 3072 elements: generated code is faster below 1,048,576"
    assert (said in record.notes) == (ops == {})


def test_the_option_turns_it_off() -> None:
    assert recognized(llama_norm, torch.randn(2, H), recognition=False) == {}


def test_a_call_under_another_priority() -> None:
    run, x = compiled(llama_norm), torch.randn(2, H)
    expected = run(x)
    assert len(opweave.compile.report().recognized) == 1
    with ir.priority(all_native()):
        torch.testing.assert_close(run(x), expected)
        report = opweave.compile.report()
    assert report.recognized == []


def test_gradients() -> None:
    model, x = Linear(torch.float32, bias=True), torch.randn(2, H)
    torch.compiler.reset()
    with torch.enable_grad():
        run = torch.compile(model, backend="opweave")
        run(x).sum().backward()
        (found,) = (p.grad for p in [model.inner.bias])
        assert torch.equal(found, torch.full((32,), 2.0))
        report = opweave.compile.report()
    assert report.recognitions == []
    assert "compile under torch.no_grad(), because ops are recognized" in str(report)
    compiled(unknown)(torch.randn(2, H))
    assert "compile under torch.no_grad()" not in str(opweave.compile.report())


def test_gradients_of_a_graph_that_calls_an_op() -> None:
    def function(x: Tensor) -> Tensor:
        found: Tensor = ir.ops.rms_norm(linear(x), None, 1e-6)
        return found

    x = torch.randn(2, H, requires_grad=True)
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(function(x).square().sum(), x)
        (found,) = torch.autograd.grad(compiled(function)(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert opweave.compile.report().recognized == []


def test_a_write_to_an_input() -> None:
    def function(x: Tensor, cache: Tensor) -> Tensor:
        cache[:2] = llama_norm(x)
        return llama_norm(cache)

    x, caches = torch.randn(2, H), torch.randn(2, 4, H)
    caches[1] = caches[0]
    expected = function(x, caches[0])
    torch.testing.assert_close(compiled(function)(x, caches[1]), expected)
    torch.testing.assert_close(caches[0], caches[1])


def test_varying_sizes_compile_once() -> None:
    def function(x: Tensor) -> Tensor:
        return silu_of_chunk(linear(llama_norm(x)))

    run = compiled(function)
    for tokens, stance in ((5, "default"), (9, "fail_on_recompile"), (2, "fail_on_recompile")):
        x = torch.randn(tokens, H)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.compiler.set_stance(stance):
            torch.testing.assert_close(run(x), function(x), atol=1e-5, rtol=1e-5)
    found = Counter(each.op for each in opweave.compile.report().recognized)
    assert found == {"rms_norm": 1, "linear": 1, "silu_and_mul": 1}


def test_the_report_names_the_source_line_and_survives_the_cache() -> None:
    run, x = compiled(llama_norm), torch.randn(2, H)
    run(x)
    report = opweave.compile.report()
    (only,) = report.recognized
    assert f"{__file__}:" in only.source
    assert "rsqrt" in only.reason
    assert "recognized in pow_1, mean, add, rsqrt, mul, mul_1" in str(report)
    again = Report.from_json(report.to_json())
    assert again.recognitions == report.recognitions


def test_recognized_ops_are_fused() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return llama_norm(total), total

    assert recognized(function, torch.randn(2, H), torch.randn(2, H)) == {"rms_norm": 1}
    (fused,) = opweave.compile.report().fused
    assert fused.op == "fused_add_rms_norm"


# Parts of tuples: code that reads other parts than a spelling does


def _parts(read: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: read(*x.chunk(2, dim=-1))


def _var_mean(read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: read(x, *torch.var_mean(x, [1], correction=0, keepdim=True))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu of a part times the part": _parts(lambda a, b: functional.silu(a) * a),
    "silu of the other part times the part": _parts(lambda a, b: functional.silu(b) * b),
    "the part times silu of the part": _parts(lambda a, b: a * functional.silu(a)),
    "gelu of a part times the part": _parts(lambda a, b: functional.gelu(a) * a),
    "gelu of the other part": _parts(lambda a, b: b * functional.gelu(b, approximate="tanh")),
    "GeGLU with the halves swapped": _parts(lambda a, b: functional.gelu(b) * a),
    "SwiGLU written out": _parts(lambda a, b: a * (a / (1 + torch.exp(-a)))),
    "SwiGLU written out, halves swapped": _parts(lambda a, b: b / (1 + torch.exp(-a)) * a),
    "SwiGLU written out, mixed": _parts(lambda a, b: a / (1 + torch.exp(-b)) * b),
    "GeGLU written out, halves swapped": _parts(
        lambda a, b: a * (a * 0.5 * (1 + torch.erf(b * 0.7071067811865476)))
    ),
    "the mean in place of the variance": _var_mean(lambda x, v, m: (x - m) * (m + 1e-5).rsqrt()),
    "the variance in place of the mean": _var_mean(lambda x, v, m: (x - v) * (v + 1e-5).rsqrt()),
    "variance and mean swapped": _var_mean(lambda x, v, m: (x - v) * (m + 1e-5).rsqrt()),
}


@pytest.mark.parametrize("name", PARTS)
def test_another_part_of_a_tuple_is_another_value(name: str) -> None:
    recognized(PARTS[name], torch.randn(6, H) + 2.0)  # the mean is positive
