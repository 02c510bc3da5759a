"""``fused_experts_quant``: against a loop in float64 with dequantized weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ir.test_linear_low_bit import w4_weight
from ir.workloads import accepts
from opweave import ir
from opweave.ir.ops.low_bit import GGUF_BLOCKS, dequantized_blocks

OP = ir.ops.fused_experts_quant
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
WIDE = {"hidden_size": 256, "intermediate_size": 256}
CASES: dict[str, dict[str, Any]] = {
    "w4a16": {"format": "w4a16"},
    "w8a16": {"format": "w8a16"},
    "w8a16_fp8": {"format": "w8a16", "weight_dtype": FP8},
    "w8a8": {"format": "w8a8"},
    "w8a8_fp8": {"format": "w8a8", "weight_dtype": FP8},
    "blocks": {"format": "w8a8", "block_size": 32},
    "ue8m0": {"format": "w8a8_ue8m0", "block_size": 32},
    "q8_0": {"format": "q8_0"},
    "q4_k and q6_k": {"format": "q4_k", "w2_format": "q6_k", **WIDE},
    "w8a16 and w4a16": {"format": "w8a16", "w2_format": "w4a16"},
}
each_provider = pytest.mark.parametrize("provider", OP.supported_providers())


def wide(weight: Tensor, scale: Tensor | None, offset: Tensor | None, format: str) -> Tensor:
    """The weight of one expert in float64."""
    if scale is None:
        return dequantized_blocks(weight, format, torch.float64)
    if format == "w4a16":
        return w4_weight(weight, scale, offset)
    factors = scale.double()
    if scale.ndim == 1:
        return weight.float().double() * factors[:, None]
    rows, columns = (size // n for size, n in zip(weight.shape, scale.shape, strict=True))
    factors = factors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight.float().double() * factors


def as_codes(row: Tensor, weight: Tensor, scale: Tensor | None, format: str) -> Tensor:
    """A token, rounded to 8 bits where the format says so."""
    if not format.startswith("w8a8"):
        return row.double()
    assert scale is not None
    groups = row.float().view(scale.shape[1] if scale.ndim == 2 else 1, -1)
    largest = groups.abs().amax(1, keepdim=True)
    if weight.dtype is torch.int8:
        factor = largest / 127
        return ((groups * (1 / factor)).round().double() * factor.double()).flatten()
    factor = largest / 448
    if format.endswith("ue8m0"):
        factor = 2.0 ** torch.ceil(torch.log2(factor))
    return ((groups / factor).to(FP8).double() * factor.double()).flatten()


def oracle(
    x: Tensor,
    w13: Tensor, w13_scale: Any, w13_offset: Any,
    w2: Tensor, w2_scale: Any, w2_offset: Any,
    weights: Tensor, ids: Tensor, w13_format: str, w2_format: str,
    activation: str = "silu", expert_map: Tensor | None = None, *rest: Any,
) -> Tensor:  # fmt: skip
    """One token and one expert at a time; products are rounded to the dtype of x."""
    assert activation == "silu"
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in itertools.product(*map(range, ids.shape)):
        e = int(ids[t, k])
        if not 0 <= e < (len(w13) if expert_map is None else len(expert_map)):
            continue
        e = e if expert_map is None else int(expert_map[e])
        if e < 0:
            continue
        own = [None if v is None else v[e] for v in (w13_scale, w13_offset, w2_scale, w2_offset)]
        row = as_codes(x[t], w13[e], own[0], w13_format)
        hidden = (wide(w13[e], own[0], own[1], w13_format) @ row).to(x.dtype)
        gate, up = hidden.chunk(2)
        hidden = (functional.silu(gate.float()).to(x.dtype) * up).to(x.dtype)
        row = as_codes(hidden, w2[e], own[2], w2_format)
        result = (wide(w2[e], own[2], own[3], w2_format) @ row).to(x.dtype)
        out[t] += float(weights[t, k]) * result.double()
    return out.to(x.dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    # All zeros where no token has an expert: 0 if equal, else large.
    norm = wanted.double().norm().clamp_min(1e-30)
    return float((found.double() - wanted.double()).norm() / norm)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype) -> None:
    options = CASES[name]
    # Rounding may give a neighboring code to a value that lies between two.
    has_codes = "a8" in options["format"]
    of_codes = 3e-3 if dtype is torch.float32 else 0.03
    limit = 3 * torch.finfo(dtype).eps + (of_codes if has_codes else 2e-6)
    for more in ({}, {"unrouted": True}, {"has_map": True, "topk": 1}, {"num_tokens": 1}):
        values = OP.generate_inputs(**options, **more, dtype=dtype)
        expected = oracle(*values)
        for provider in OP.supported_providers():
            if accepts(OP, provider, values):
                found = OP.using(f"{provider}!")(*values)
                assert error(found, expected) < limit, provider
                assert found.dtype is dtype
                assert found.is_contiguous()


@each_provider
def test_no_tokens_and_no_experts(provider: str) -> None:
    call = OP.using(f"{provider}!")
    assert call(*OP.generate_inputs(num_tokens=0)).shape == (0, 64)
    values = OP.generate_inputs()
    nobody = torch.full_like(values[8], -1)
    assert not call(*values[:8], nobody, *values[9:]).any()


@each_provider
def test_weights_on_inputs_and_other_activations(provider: str) -> None:
    values = OP.generate_inputs(topk=1)
    x, weights, topk_weights = values[0], values[1:7], values[7]
    ids, w13, w2, options = *values[8:11], values[14:]
    for activation in ("gelu", "relu2"):
        rest = (ids, w13, w2, activation, None, True, *options)
        found = OP.using(f"{provider}!")(x, *weights, topk_weights, *rest)
        scaled = x * topk_weights
        rest = (ids, w13, w2, activation, None, False, *options)
        wanted = OP.native(scaled, *weights, torch.ones_like(topk_weights), *rest)
        assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("format", ["w4a16", "w8a16", "q8_0"])
def test_experts_are_those_of_fused_experts(format: str) -> None:
    values = OP.generate_inputs(num_tokens=17, format=format)
    x, *parts = values[:7]
    dense = [
        torch.stack([
            wide(part, *(None if v is None else v[e] for v in parts[at + 1 : at + 3]), format)
            for e, part in enumerate(parts[at])
        ]).float()
        for at in (0, 3)
    ]  # fmt: skip
    wanted = ir.ops.fused_experts(x, *dense, *values[7:9])
    assert error(OP(*values), wanted) < 1e-5


GOOD = OP.bind(*OP.generate_inputs())
NAMES = OP.schema.names
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"w13_format": "int3"}, "w13_format must be one of 'w4a16', .*; found 'int3'"),
    ({"w2_format": "q8_0"}, r"w2 must be \(experts, rows, 34\) for q8_0 of 32 columns"),
    ({"w13_scale": None}, "w13_scale must be a tensor for w4a16"),
    ({"w13_offset": torch.ones(3, 64, 2)}, "w13_offset must be None, or like the scale"),
    ({"w2_scale": torch.ones(3, 64, 1)}, "w2_scale must be with a first dimension of 4 experts"),
    ({"w2": torch.ones(4, 60, 16, dtype=torch.uint8)}, r"w2 must be \(4, 64, \.\.\.\) to fit"),
    ({"x": torch.ones(2, 3, 64)}, r"x must be floating point, \(tokens, hidden\)"),
    ({"topk_ids": torch.ones(8, 2)}, "topk_ids must be integers"),
    ({"topk_weights": torch.ones(8, 3)}, "topk_weights must be like topk_ids"),
]


@each_provider
@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_arguments(changes: dict[str, Any], message: str, provider: str) -> None:
    values = [changes.get(name, value) for name, value in zip(NAMES, GOOD, strict=True)]
    with pytest.raises(ValueError, match=f"fused_experts_quant: {message}"):
        OP.using(provider)(*values)


def test_gguf_formats_are_all_supported() -> None:
    for format in GGUF_BLOCKS:
        values = OP.generate_inputs(format=format, **WIDE)
        assert error(OP(*values), oracle(*values)) < 1e-5
