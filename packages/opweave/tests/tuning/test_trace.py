"""Traces: recording, files, replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.errors import UnknownOpError
from opweave.tuning import Effort, Trace, TracedCall, TraceError, record_calls, replay
from opweave.tuning.trace import build, describe, signature

QUICK = Effort(rounds=2, seconds=1e-5)


def model(tokens: int) -> None:
    x, weight = torch.randn(tokens, 8), torch.ones(8)
    for _ in range(3):
        x = ir.ops.rms_norm(x, weight, 1e-6)
    x, _ = ir.ops.fused_add_rms_norm.maybe_inplace(x, torch.randn(tokens, 8), weight, 1e-6)
    cos_sin = torch.rand(16, 4)
    ir.ops.rotary_embedding(x, x.clone(), torch.arange(tokens), cos_sin, 4, True)


def recorded(*, data: bool = False) -> Trace:
    with record_calls(data=data) as recorder:
        model(2)
        model(5)
        model(5)
    return recorder.trace


def test_each_distinct_call_is_recorded_once() -> None:
    found = {(call.op, call.tokens): call for call in recorded().calls}
    assert {key: call.count for key, call in found.items()} == {
        ("rms_norm", 2): 3, ("fused_add_rms_norm", 2): 1, ("rotary_embedding", 2): 1,
        ("rms_norm", 5): 6, ("fused_add_rms_norm", 5): 2, ("rotary_embedding", 5): 2,
    }  # fmt: skip
    norm = found["rms_norm", 5]
    assert (
        norm.provider == ir.ops.rms_norm.dispatch(torch.randn(5, 8), torch.ones(8), 1e-6).provider
    )
    assert list(norm.arguments) == ["x", "weight", "epsilon", "variance_size"]
    assert norm.arguments["epsilon"] == {"type": "scalar", "value": 1e-6}
    assert found["rotary_embedding", 5].arguments["positions"]["values"] == [0, 1, 2, 3, 4]


def test_recording_does_not_change_results() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    expected = ir.ops.rms_norm(x, weight, 1e-6)
    with record_calls():
        assert torch.equal(ir.ops.rms_norm(x, weight, 1e-6), expected)


def test_a_file_gives_the_same_trace(tmp_path: Path) -> None:
    trace, file = recorded(), tmp_path / "trace.jsonl"
    trace.save(file)
    assert Trace.load(file) == trace
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
    header = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert header["torch"] == torch.__version__
    assert header["device"] == "cpu"


def test_stored_data_gives_the_same_tensors(tmp_path: Path) -> None:
    x = torch.randn(4, 16)[:, ::2]
    weight = torch.randn(8)
    with record_calls(data=True) as recorder:
        ir.ops.rms_norm(x, weight, 1e-6)
    recorder.trace.save(tmp_path / "trace.jsonl")
    trace = Trace.load(tmp_path / "trace.jsonl")
    values = trace.values(trace.calls[0])
    assert torch.equal(values[0], x)
    assert values[0].stride() == x.stride()
    assert torch.equal(values[1], weight)
    assert replay(trace, trace.calls[0], effort=QUICK).status == "passed"


def test_data_is_that_before_the_call() -> None:
    x, residual, weight = torch.randn(2, 8), torch.randn(2, 8), torch.ones(8)
    before = x.clone()
    with record_calls(data=True) as recorder:
        ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-6)
    trace = recorder.trace
    assert torch.equal(trace.values(trace.calls[0])[0], before)


def test_random_arguments_depend_on_the_seed_only() -> None:
    trace = recorded()
    first, again, other = (trace.values(trace.calls[0], seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("provider", [None, "native", "opweave_c"])
def test_replay_of_a_right_implementation(provider: str | None) -> None:
    trace = recorded()
    for call in trace.calls:
        found = replay(trace, call, provider, effort=QUICK)
        assert (found.status, found.reason) == ("passed", ""), call
        assert found.time is not None
        assert found.time.microseconds > 0
        if provider is None:
            assert found.provider == found.default == call.provider


Kernel = Callable[[Tensor, float], Tensor]


@pytest.fixture
def scaled() -> Iterator[ir.IrOp]:
    """An op with a right, a wrong, a raising and a choosy implementation."""
    with ir.isolated_registry():

        @ir.register_op
        def scaled(x: Tensor, factor: float) -> Tensor:
            return x * factor

        @scaled.register_impl("right")
        def _(x: Tensor, factor: float) -> Tensor:
            return factor * x

        @scaled.register_impl("wrong")
        def _(x: Tensor, factor: float) -> Tensor:
            return x * factor + 1

        @scaled.register_impl("raising")
        def _(x: Tensor, factor: float) -> Tensor:
            raise RuntimeError("no such luck")

        @scaled.register_impl("choosy", supports_args=lambda x: x.shape[0] == 1)
        def _(x: Tensor, factor: float) -> Tensor:
            return x * factor

        @scaled.register_impl("absent", supported=False, unsupported_reason="not installed")
        def _(x: Tensor, factor: float) -> Tensor:
            return x * factor

        yield scaled


@pytest.mark.parametrize(
    ("provider", "status", "reason"),
    [
        ("right", "passed", ""),
        ("wrong", "failed", "native has"),
        ("raising", "failed", "no such luck"),
        ("choosy", "rejected", ""),
        ("absent", "rejected", "not installed"),
        ("unknown", "rejected", "no implementation from unknown"),
    ],
)
def test_replay_verifies(scaled: ir.IrOp, provider: str, status: str, reason: str) -> None:
    with record_calls() as recorder:
        scaled(torch.randn(3, 4), 2.0)
    trace = recorder.trace
    found = replay(trace, trace.calls[0], provider, effort=QUICK)
    assert found.status == status
    assert reason in found.reason
    assert bool(found.reason) == (status != "passed")
    assert (found.time is not None) == (status == "passed")


def test_arguments_that_cannot_be_recorded_are_named(scaled: ir.IrOp) -> None:
    with record_calls() as recorder:
        scaled(torch.eye(3).to_sparse(), 2.0)
    assert recorder.trace.calls == []
    assert "sparse" in recorder.trace.skipped["scaled"]


HEADER = '{"format": "opweave trace", "version": 1, "device": "cpu", "data": null}\n'
LINE = '{"op": "a", "provider": "b", "count": 1, "tokens": 1, "arguments": {"x": %s}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is not a JSON object"),
        ("[]", "line 1 is not a JSON object"),
        ('{"format": "other", "version": 1}', "the first line should be the header"),
        (HEADER.replace("1", "2"), "version 1"),
        (HEADER + "{", "line 2 is not a JSON object"),
        (HEADER + '{"op": "rms_norm"}', "line 2: 'provider' should be str"),
        (HEADER + LINE % "3", "line 2: argument 'x': expected an object with a 'type'"),
        (HEADER + LINE % '{"type": "odd"}', "line 2: argument 'x': expected an object"),
        (HEADER + LINE % '{"type": "values", "dtype": "int8"}', "values lacks shape, stride"),
        (HEADER + LINE % '{"type": "list", "items": [{"type": "scalar"}]}', "scalar lacks value"),
        (HEADER + LINE % '{"type": ["scalar"]}', "line 2: argument 'x': expected an object"),
        (HEADER + LINE % ("[" * 10**5), "line 2 is not a JSON object"),
        (HEADER.replace("null", 'null, "skipped": [1]'), r"'skipped' should be an object"),
        (HEADER.replace("null", '"gone.safetensors"'), "cannot read its tensors"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=message) as raised:
        Trace.load(file)
    assert str(file) in str(raised.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    for content in (None, b"\xff\xfe\x00"):
        if content is not None:
            (tmp_path / "trace.jsonl").write_bytes(content)
        with pytest.raises(TraceError, match="cannot read the trace"):
            Trace.load(tmp_path / "trace.jsonl")


def test_calls_that_do_not_fit_the_op() -> None:
    trace = Trace.here()
    with pytest.raises(UnknownOpError, match="unknown op 'rms_nrom'"):
        trace.op(TracedCall("rms_nrom", "native", 1, 1, {}))
    with pytest.raises(TraceError, match="Record the trace again"):
        trace.op(TracedCall("rms_norm", "native", 1, 1, {"x": {}}))
    with pytest.raises(TraceError, match="cannot build the recorded arguments"):
        trace.values(TracedCall("rms_norm", "native", 1, 1, {"x": {"type": "random"}}))


# Descriptions of arguments, and arguments built from them.


def rebuilt(value: Any) -> Any:
    described = json.loads(json.dumps(describe(value)))
    return build(described, lambda given: pytest.fail("nothing is stored"), {})


@pytest.mark.parametrize(
    "value", [1, 1.5, True, None, "gelu", -0.25, [1, 2, None], torch.bfloat16, torch.device("cpu")]
)
def test_plain_values_come_back(value: Any) -> None:
    assert rebuilt(value) == value
    assert type(rebuilt(value)) is type(value)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 2:5],
    "rows": lambda t: t[1:4],
    "expanded": lambda t: t[:1].expand(7, -1),
    "overlapping": lambda t: t.view(-1).as_strided((4, 5), (2, 1), 3),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[2, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_come_back_in_their_layout(layout: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[layout](torch.randint(0, 2 if dtype is torch.bool else 99, (6, 8)).to(dtype))
    found = rebuilt(tensor)
    assert torch.equal(found, tensor)
    assert (found.dtype, signature(found)) == (dtype, signature(tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_random_floats_have_the_layout_and_the_range(layout: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[layout]((torch.rand(6, 8) + 0.5).to(dtype))
    found = rebuilt(tensor)
    assert signature(found) == signature(tensor)
    if found.numel():
        assert found.to(torch.float64).min() >= 0.5  # scales must stay positive
        assert found.to(torch.float64).max() <= 1.5


def test_random_floats_have_the_mean_and_the_deviation() -> None:
    torch.manual_seed(0)
    found = rebuilt(torch.randn(40_000) * 3 - 7)
    assert found.mean().item() == pytest.approx(-7, abs=0.1)
    assert found.std().item() == pytest.approx(3, abs=0.1)


def test_statistics_leave_out_what_is_not_finite() -> None:
    found = rebuilt(torch.tensor([1.0, float("nan"), float("inf"), 3.0]))
    assert found.isfinite().all()
    assert 1 <= found.min() <= found.max() <= 3


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_packed_weights_are_random_in_their_range(dtype: torch.dtype) -> None:
    weight = torch.randint(3, 50, (2**17,)).to(dtype)
    described = describe(weight)
    assert described["type"] == "random"
    found = rebuilt(weight)
    assert found.dtype is dtype
    assert (int(found.min()), int(found.max())) == (3, 49)


def test_tensors_in_lists() -> None:
    given = [torch.arange(3), None, torch.ones(2, 2)]
    found = rebuilt(given)
    assert torch.equal(found[0], given[0])
    assert found[1] is None
    assert torch.equal(found[2], given[2])


def test_stored_tensors_come_back() -> None:
    tensor = torch.randn(6, 8)[:, 1:4]
    stored: dict[str, Tensor] = {}

    def keep(value: Tensor) -> str:
        stored["key"] = value.clone()
        return "key"

    described = describe(tensor, keep)
    found = build(described, lambda given: stored[given["tensor_key"]], {})
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_equal_numbers_of_other_types_have_other_signatures() -> None:
    assert len({signature(value) for value in (1, 1.0, True, "1", None)}) == 5


def test_sparse_tensors_cannot_be_recorded() -> None:
    with pytest.raises(TraceError, match=r"layout torch\.sparse_coo cannot be recorded"):
        describe(torch.eye(3).to_sparse())
