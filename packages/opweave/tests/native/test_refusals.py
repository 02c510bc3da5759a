"""Arguments that the kernels refuse: what both call paths say, and that nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.ir.ops.low_bit import random_blocks
from opweave.kernels.opweave_c.linear import FORMATS

from .oracle import CALL_PATHS, FP8, INT8, call_path
from .paged_cases import case as paged_case

Arguments = dict[str, Any]
Refusal = tuple[str, Arguments, str]

F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64
NAN = float("nan")


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=FP8)


def within(
    name: str, *shape: int, dtype: torch.dtype | None = None
) -> Callable[[Arguments], Tensor]:
    """Return a tensor of this shape in the memory of another argument."""

    def view(arguments: Arguments) -> Tensor:
        memory = arguments[name].view(dtype or arguments[name].dtype).view(-1)
        return memory[: torch.Size(shape).numel()].view(shape)

    return view


def to(name: str, dtype: torch.dtype) -> Callable[[Arguments], Tensor]:
    return lambda arguments: arguments[name].to(dtype)


def rotary(**more: Any) -> Arguments:
    return {
        "out_query": ones(3, 16),
        "out_key": ones(3, 8),
        "query": ones(3, 16),
        "key": ones(3, 8),
        "positions": torch.zeros(3, dtype=torch.int64),
        "cache": ones(4, 8),
        **more,
        "head_size": 8,
        "is_neox": True,
    }


def paged(**more: Any) -> Arguments:
    c = paged_case([(1, 20), (3, 3)])
    values = dict(c.__dict__)
    head = {name: values.pop(name) for name in list(values)[:6]}
    return {"out": c.out(), **head, **more, **values}


def cached() -> Arguments:
    return {
        "key": ones(7, 2, 8),
        "value": ones(7, 2, 8),
        "key_cache": ones(4, 2, 16, 8),
        "value_cache": ones(4, 2, 16, 8),
        "slots": ints(*range(7)),
    }


def rope_cached() -> Arguments:
    rest = cached()
    return {
        "out": ones(7, 32),
        "query": ones(7, 32),
        "key": ones(7, 16),
        "value": rest["value"],
        "positions": torch.zeros(7, dtype=torch.int64),
        "table": ones(64, 8),
        **{name: rest[name] for name in ("key_cache", "value_cache", "slots")},
        "head_size": 8,
        "is_neox": True,
    }


def q4(**more: Any) -> Arguments:
    return {
        "out": ones(2, 3),
        "x": ones(2, 64),
        "weight": torch.ones(3, 32, dtype=torch.uint8),
        "scale": ones(3, 2),
        "offset": None,
        "bias": None,
        **more,
    }


def q4_k(**more: Any) -> Arguments:
    format = FORMATS.index("q4_k")
    weight = random_blocks(3, 256, "q4_k")
    return {
        "out": ones(2, 3),
        "x": ones(2, 256),
        "weight": weight,
        "bias": None,
        "format": format,
        **more,
    }


def of_linear(weight: torch.dtype = torch.float32, **more: Any) -> Arguments:
    scale = {} if weight is torch.float32 else {"scale": ones(3)}
    weights = {"weight": ones(3, 8).to(weight), **scale}
    return {"out": ones(2, 3), "x": ones(2, 8), **weights, "bias": None, **more}


def normed(**more: Any) -> Arguments:
    return {"out": ones(2, 8), "x": ones(2, 8), "weight": None, **more}


BASES: dict[str, Callable[[], Arguments]] = {
    "rms_norm": lambda: normed(epsilon=1e-6),
    "fused_add_rms_norm": lambda: {
        "x": ones(2, 8), "residual": ones(2, 8), "weight": None, "epsilon": 1e-6,
    },
    "add_rms_norm": lambda: {
        "out": ones(2, 8), "sum": ones(2, 8), "x": ones(2, 8), "residual": ones(2, 8),
        "weight": None, "epsilon": 1e-6,
    },
    "layer_norm": lambda: normed(bias=None, epsilon=1e-5),
    "rms_norm_gated": lambda: normed(
        gate=ones(2, 8), epsilon=1e-5, group_size=8, before=False, sigmoid=False
    ),
    "silu_and_mul": lambda: {"out": ones(4, 8), "x": ones(4, 16)},
    "mul_and_silu": lambda: {"out": ones(4, 8), "x": ones(4, 16)},
    "gelu_and_mul": lambda: {"out": ones(4, 8), "x": ones(4, 16), "tanh": False},
    "gelu_and_mul_sparse": lambda: {"out": ones(4, 8), "x": ones(4, 16), "k": 1.0, "tanh": True},
    "fatrelu_and_mul": lambda: {"out": ones(4, 8), "x": ones(4, 16), "threshold": 0.0},
    "swigluoai_and_mul": lambda: {"out": ones(4, 8), "x": ones(4, 16), "alpha": 1.7, "limit": 7.0},
    "gelu_new": lambda: {"out": ones(4, 8), "x": ones(4, 8)},
    "gelu_fast": lambda: {"out": ones(4, 8), "x": ones(4, 8)},
    "quick_gelu": lambda: {"out": ones(4, 8), "x": ones(4, 8)},
    "relu2": lambda: {"out": ones(4, 8), "x": ones(4, 8)},
    "xielu": lambda: {
        "out": ones(4, 8), "x": ones(4, 8), "alpha_p": ones(1), "alpha_n": ones(1),
        "beta": 0.5, "eps": 0.0,
    },
    "static_quant": lambda: {"out": codes(4, 6), "x": ones(4, 6), "scale": ones(1)},
    "dynamic_per_token_quant": lambda: {
        "out": codes(4, 6), "scale": ones(4, 1), "x": ones(4, 6), "bound": None,
    },
    "dynamic_per_tensor_quant_fp8": lambda: {
        "out": codes(4, 6), "scale": ones(1), "x": ones(4, 6),
    },
    "per_token_group_quant_fp8": lambda: {
        "out": codes(4, 6), "scale": ones(4, 1), "x": ones(4, 6), "size": 6, "ue8m0": False,
    },
    "rms_norm_static_quant": lambda: {
        "out": codes(4, 6), "x": ones(4, 6), "weight": None, "scale": ones(1), "epsilon": 1e-6,
    },
    "rms_norm_per_token_quant": lambda: {
        "out": codes(4, 6), "scale": ones(4, 1), "x": ones(4, 6), "weight": None,
        "epsilon": 1e-6, "bound": None,
    },
    "fused_add_rms_norm_static_quant": lambda: {
        "out": codes(4, 6), "sum": ones(4, 6), "x": ones(4, 6), "residual": ones(4, 6),
        "weight": None, "scale": ones(1), "epsilon": 1e-6,
    },
    "fused_add_rms_norm_per_token_quant": lambda: {
        "out": codes(4, 6), "scale": ones(4, 1), "sum": ones(4, 6), "x": ones(4, 6),
        "residual": ones(4, 6), "weight": ones(6), "epsilon": 1e-6, "bound": None,
    },
    "silu_and_mul_static_quant": lambda: {
        "out": codes(4, 3), "x": ones(4, 6), "scale": ones(1),
    },
    "silu_and_mul_per_token_quant": lambda: {
        "out": codes(4, 3), "scale": ones(4, 1), "x": ones(4, 6), "bound": ones(1),
    },
    "silu_and_mul_group_quant_fp8": lambda: {
        "out": codes(4, 3), "scale": ones(4, 1), "x": ones(4, 6), "size": 3, "ue8m0": False,
    },
    "linear": of_linear,
    "linear_many": lambda: of_linear(fewest=0),
    "linear_w8a16": lambda: of_linear(INT8),
    "linear_w8a16_many": lambda: of_linear(INT8, fewest=0),
    "widen_rows": lambda: {"out": ones(3, 8), "weight": ones(3, 8).to(INT8), "scale": ones(3)},
    "linear_w4a16": q4,
    "linear_w4a16_int8": q4,
    "linear_w4a16_many": lambda: q4(fewest=1),
    "widen_w4": lambda: {
        "out": ones(3, 64), "weight": q4()["weight"], "scale": ones(3, 2), "offset": None,
    },
    "linear_gguf": q4_k,
    "linear_gguf_int8": q4_k,
    "linear_gguf_many": lambda: q4_k(fewest=1),
    "widen_gguf": lambda: {
        "out": ones(3, 256), "weight": q4_k()["weight"], "format": q4_k()["format"],
    },
    "rotary_embedding": rotary,
    "qk_norm_rope": lambda: rotary(query_weight=None, key_weight=None, epsilon=1e-6),
    "reshape_and_cache": cached,
    "rope_reshape_and_cache": rope_cached,
    "paged_attention": paged,
    "attention_quant": lambda: {
        **paged(out_scale=torch.tensor([0.02])), "out": codes(4, 256),
    },
}  # fmt: skip
"""Arguments of each op that it takes."""

SHARED_WITH = "is written and must not share memory with"
OF_LAST = "contiguous in its last dimension"


def norms() -> Iterator[Refusal]:
    rms: list[tuple[Arguments, str]] = [
        ({"x": ones(2, 8, dtype=F64)}, "x must be float32 or bfloat16 or float16, found float64"),
        ({"x": ones(2, 8, dtype=torch.complex64)}, "found a dtype that no native kernel takes"),
        ({"x": ones(2, 8, dtype=torch.bool)}, "or float16, found bool"),
        ({"out": torch.tensor(1.0), "x": torch.tensor(1.0)}, "x must have at least one dimension"),
        ({"x": ones(8, 2).t()}, f"x must be {OF_LAST}, found float32 [2, 8] with strides [1, 2]"),
        ({"out": ones(8, 2).t()}, f"out must be {OF_LAST}"),
        ({"out": ones(1, 8)}, "out must have the shape of x, [2, 8], found float32 [1, 8]"),
        ({"out": ones(2, 8, dtype=BF16)}, "out must have the dtype of x, float32"),
        ({"weight": ones(7)}, "weight must be None or have shape [8], the last dimension of x"),
        ({"weight": ones(8, dtype=F16)}, "weight must be float32, found float16 [8]"),
        ({"weight": ones(1, 8)}, "weight must be None or have shape [8]"),
        ({"weight": ones(16)[::2]}, f"weight must be {OF_LAST}"),
        ({"out": ones(1, 8).expand(2, 8)}, "out must not overlap itself"),
        ({"out": ones(9).as_strided((2, 8), (1, 1))}, "out must not overlap itself"),
        ({"x": lambda a: a["out"].view(-1)[4:12].view(1, 8), "out": lambda a: a["out"][:1]},
         f"out {SHARED_WITH} x"),
        ({"weight": lambda a: a["out"][1]}, f"out {SHARED_WITH} weight"),
        ({"out": ones(*[1] * 9), "x": ones(*[1] * 9)}, "out must have at most 8 dimensions"),
    ]  # fmt: skip
    yield from (("rms_norm", *refused) for refused in rms)
    for changes, message in (
        ({"residual": lambda a: a["x"]}, f"x {SHARED_WITH} residual"),
        ({"residual": ones(1, 8).expand(2, 8)}, "residual must not overlap itself"),
        ({"residual": ones(2, 8, dtype=F16)}, "residual must have the dtype of x, float32"),
    ):
        yield "fused_add_rms_norm", changes, message
    for name, other in (("sum", "out"), ("out", "x"), ("sum", "residual")):
        yield "add_rms_norm", {name: lambda a, other=other: a[other]}, "share"
    for changes, message in (
        ({"out": ones(1, 8)}, "out must have the shape of x, [2, 8]"),
        ({"weight": ones(7)}, "weight must be None or have shape [8]"),
        ({"bias": ones(1, 8)}, "bias must be None or have shape [8]"),
        ({"weight": ones(8, dtype=F16)}, "weight must be float32"),
        ({"bias": ones(8, dtype=F16)}, "bias must be float32"),
        ({"weight": within("out", 8)}, f"out {SHARED_WITH} weight"),
        ({"out": lambda a: a["x"][:, :4], "x": lambda a: a["x"][:, 1:5]}, f"out {SHARED_WITH} x"),
        (
            {"out": to("out", F16), "x": to("x", F16), "weight": ones(8).half(), "bias": ones(8)},
            "bias must have the dtype of weight, float16",
        ),
    ):
        yield "layer_norm", changes, message
    for changes, message in (
        ({"group_size": 3}, "group_size must divide 8, the last dimension of x, found 3"),
        ({"group_size": 0}, "group_size must divide 8"),
        ({"group_size": -8}, "group_size must divide 8"),
        ({"weight": ones(7)}, "weight must be None or have shape [8]"),
        ({"gate": ones(1, 8)}, "gate must have the shape of x, [2, 8]"),
        ({"gate": ones(2, 8, dtype=F16)}, "gate must have the dtype of x, float32"),
        ({"weight": within("out", 8)}, f"out {SHARED_WITH} weight"),
        (
            {
                "gate": lambda a: a["out"].view(-1)[4:12].view(1, 8),
                "out": lambda a: a["out"][:1],
                "x": ones(1, 8),
            },
            f"out {SHARED_WITH} gate",
        ),
    ):
        yield "rms_norm_gated", changes, message


def activations() -> Iterator[Refusal]:
    for op in (name for name in BASES if name.endswith(("_and_mul", "and_silu", "mul_sparse"))):
        for changes, message in (
            ({"out": ones(4, 16)}, "out must have the shape of x with half of its last dimension"),
            ({"out": ones(8)}, "out must have the shape of x with half of its last dimension"),
            ({"out": ones(4, 7), "x": ones(4, 15)}, "the last dimension of x must be even"),
            ({"out": lambda a: a["x"][:, :8]}, f"out {SHARED_WITH} x"),
            ({"out": ones(4, 8, dtype=F16)}, "out must have the dtype of x, float32"),
            ({"out": ones(4, 8).int(), "x": ones(4, 16).int()}, "x must be float32 or"),
            ({"out": ones(8, 4).t()}, f"out must be {OF_LAST}"),
            ({"x": ones(16, 4).t()}, f"x must be {OF_LAST}"),
            ({"out": ones(1, 8).expand(4, 8)}, "out must not overlap itself"),
        ):
            yield op, changes, message
    buffer = ones(40)
    for op in ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "xielu"):
        for changes, message in (
            ({"x": ones(4, 16)}, "out must have the shape of x, [4, 16]"),
            ({"out": buffer[1:33].view(4, 8), "x": buffer[:32].view(4, 8)}, f"out {SHARED_WITH} x"),
            ({"out": ones(4, 8, dtype=F16)}, "out must have the dtype of x, float32"),
            ({"out": torch.tensor(1.0), "x": torch.tensor(1.0)}, "at least one dimension"),
        ):
            yield op, changes, message
    for changes, message in (
        ({"alpha_p": ones(2)}, "alpha_p must have one element, found float32 [2]"),
        ({"alpha_n": ones(0)}, "alpha_n must have one element"),
        ({"alpha_p": ones(1, dtype=F16)}, "alpha_p must have the dtype of x"),
        ({"alpha_p": within("out", 1)}, "must not share memory with alpha_p"),
    ):
        yield "xielu", changes, message


def quantization() -> Iterator[Refusal]:
    token, static, group = (
        "dynamic_per_token_quant", "static_quant", "per_token_group_quant_fp8",
    )  # fmt: skip
    yield token, {"x": to("x", F64)}, "x must be float32 or bfloat16 or float16"
    yield token, {"out": ones(4, 6)}, "out must be float8_e4m3fn or int8"
    yield token, {"out": lambda a: a["out"][:, :5]}, "out must have the shape of x"
    yield token, {"x": ones(4, 12)[:, ::2]}, f"x must be {OF_LAST}"
    yield static, {"out": lambda a: a["out"].t(), "x": ones(6, 4)}, "out must be contiguous in"
    yield token, {"scale": ones(4)}, "scale must have shape [4, 1]"
    yield token, {"scale": ones(4, 1, dtype=F64)}, "scale must be float32"
    yield token, {"bound": ones(4, 1)}, "scale_ub must be None or have one element"
    yield static, {"scale": ones(3, 1)}, "where a divides the 4 rows of x and b"
    yield static, {"scale": ones(6)}, "scale must have one element, or shape"
    yield group, {"size": 0}, "group_size must be at least 1"
    yield group, {"size": 4}, "scale must have shape [4, 2]"
    yield group, {"out": lambda a: a["out"].view(INT8)}, "out must be float8_e4m3fn, found"
    yield "dynamic_per_tensor_quant_fp8", {"scale": ones(4, 1)}, "scale must have one element"
    yield token, {"out": within("x", 4, 6, dtype=INT8)}, f"out {SHARED_WITH} x"
    yield static, {"out": codes(), "x": torch.tensor(1.0)}, "x must have at least one dimension"

    static, token = "rms_norm_static_quant", "rms_norm_per_token_quant"
    add, silu = "fused_add_rms_norm_static_quant", "silu_and_mul_group_quant_fp8"
    yield static, {"x": to("x", F64)}, "x must be float32 or bfloat16"
    yield static, {"out": ones(4, 6)}, "out must be float8_e4m3fn or int8"
    yield static, {"weight": ones(5)}, "weight must be None or have shape"
    yield static, {"scale": ones(4, 1)}, "scale must have one element"
    yield token, {"scale": ones(1)}, "scale must have shape [4, 1]"
    yield token, {"bound": ones(4, 1)}, "scale_ub must be None or have one element"
    yield add, {"residual": ones(4, 5)}, "residual must have the shape of"
    yield add, {"sum": ones(4, 6, dtype=F16)}, "residual_out must have the"
    yield add, {"sum": ones(6, 4).t()}, "contiguous"
    yield add, {"out": within("x", 4, 6, dtype=FP8)}, "must not share memory"
    yield silu, {"out": codes(4, 6)}, "out must have the shape of x with half of its last"
    yield silu, {"size": 0}, "group_size must be at least 1"
    yield silu, {"size": 2}, "scale must have shape [4, 2]"
    yield silu, {"out": lambda a: a["out"].view(INT8)}, "out must be float8_e4m3fn, found"


def linear_layers() -> Iterator[Refusal]:
    yield "linear", {"x": to("x", F64)}, "x must be float32 or bfloat16 or float16"
    yield "linear", {"x": ones(8, 2).t()}, f"x must be {OF_LAST}"
    yield "linear", {"weight": ones(8, 3).t()}, f"weight must be {OF_LAST}"
    yield "linear", {"weight": ones(8)}, "weight must have shape [out_features, 8]"
    yield "linear", {"out": to("out", F16)}, "out must have the dtype of x, float32"
    yield "linear", {"out": ones(6)}, "out must have shape [2, 3]"
    yield "linear", {"out": ones(2, 4)[:, :3]}, "out must be contiguous"
    yield "linear", {"bias": ones(3, dtype=F64)}, "bias must be float32"
    for op in ("linear", "linear_many"):
        yield op, {"weight": to("weight", F16)}, "weight must have the dtype of x, float32"
        yield op, {"weight": ones(3, 7)}, "weight must have shape [out_features, 8]"
        yield op, {"out": within("weight", 2, 3)}, f"out {SHARED_WITH}"
    for op in ("linear_w8a16", "linear_w8a16_many"):
        yield op, {"weight": ones(3, 8)}, "weight must be int8 or float8_e4m3fn"
        yield op, {"weight": lambda a: a["weight"][:, :7]}, "weight must have shape"
        yield op, {"scale": ones(2)}, "scale must have shape [1] or [3]"
        yield op, {"scale": ones(1, 3)}, "scale must have shape [1] or [3]"
        yield op, {"scale": ones(3, dtype=F64)}, "scale must be float32"
        yield op, {"scale": within("out", 3)}, f"out {SHARED_WITH}"
    for op in (name for name in BASES if name.startswith("linear")):
        yield op, {"out": ones(2, 4)}, "out must have shape [2, 3]"
        yield op, {"bias": ones(2)}, "bias must have shape [3]"
    for changes, message in (
        ({"out": to("out", F16)}, "out must be float32"),
        ({"weight": ones(3, 8)}, "weight must be int8 or float8_e4m3fn"),
        (
            {"weight": lambda a: a["weight"][0]},
            "weight must have shape [out_features, in_features]",
        ),
        ({"weight": ones(8, 3).to(INT8).t()}, f"weight must be {OF_LAST}"),
        ({"out": ones(2, 8)}, "out must have the shape of weight, [3, 8]"),
        ({"out": ones(3, 9)[:, :8]}, "out must be contiguous"),
        ({"scale": ones(2)}, "scale must have shape [1] or [3]"),
        ({"weight": within("out", 3, 8, dtype=INT8)}, f"out {SHARED_WITH}"),
        ({"scale": within("out", 3)}, f"out {SHARED_WITH}"),
    ):
        yield "widen_rows", changes, message
    for op in ("linear_w4a16", "linear_w4a16_int8", "linear_w4a16_many"):
        yield op, {"x": to("x", F64)}, "x must be float32"
        yield op, {"x": ones(2, 62)}, "x must have shape [..., 64]"
        yield op, {"weight": lambda a: a["weight"].int()}, "weight must be uint8"
        yield op, {"scale": ones(3, 2, dtype=F64)}, "scale must be float32"
        yield op, {"scale": ones(3, 3)}, "scale must have shape [3, groups]"
        yield op, {"scale": ones(2, 2)}, "scale must have shape [3, groups]"
        yield op, {"scale": ones(3, 16)}, "a multiple of 8 columns of 64"
        yield op, {"offset": ones(3, 2, dtype=F16)}, "offset must"
        yield op, {"offset": ones(3, 1)}, "offset must"
        yield op, {"scale": within("out", 3, 1)}, f"out {SHARED_WITH}"
    yield "widen_w4", {"out": ones(2, 3)}, "out must have shape [3, 64]"
    for op in ("linear_gguf", "linear_gguf_int8", "linear_gguf_many"):
        yield op, {"format": 6}, "format must be from 0 to 5, found 6"
        yield op, {"format": -1}, "format must be from 0 to 5, found -1"
        yield op, {"format": 0}, "weight must have shape [out_features, 272], blocks for"
        yield op, {"x": ones(2, 224)}, "weight must have shape"
        yield op, {"weight": lambda a: a["weight"].int()}, "weight must be uint8"
    yield "widen_gguf", {"out": ones(2, 256)}, "the rows of weight"


def rotation() -> Iterator[Refusal]:
    def in_place(**changes: Any) -> Arguments:
        return {**changes, "out_query": lambda a: a["query"], "out_key": lambda a: a["key"]}

    shared, op = ones(3, 40), "rotary_embedding"
    both = {"query": shared[:, :16], "key": shared[:, 8:16]}
    for changes, message in (
        ({"query": ones(3, 16, dtype=F64)}, "query must be float32 or bfloat16"),
        ({"query": ones(4, 16)}, "query must have shape [*[3], heads * head_size]"),
        ({"query": ones(3)}, "query must have shape [*[3], heads * head_size]"),
        ({"query": ones(3, 17)}, "query must have shape [..., heads * 8]"),
        ({"key": ones(3, 2, 4)}, "key must have shape [..., heads * 8]"),
        ({"key": ones(16, 3).t()}, f"key must be {OF_LAST}"),
        ({"key": ones(3, 8, dtype=F16)}, "key must have the dtype of query"),
        ({"out_key": ones(3, 1, 8)}, "out_key must have the shape of key"),
        ({"out_query": ones(1, 16).expand(3, 16)}, "out_query must not overlap itself"),
        ({"head_size": 0}, "head_size must be positive, found 0"),
        ({"cache": ones(4, 10)}, "cos_sin_cache must have shape [max_position, r]"),
        ({"cache": ones(4, 7)}, "cos_sin_cache must have shape [max_position, r]"),
        ({"cache": ones(8)}, "cos_sin_cache must have shape [max_position, r]"),
        ({"cache": ones(4, 8, dtype=BF16)}, "cos_sin_cache must be float32"),
        ({"positions": ones(3)}, "positions must be int64 or int32"),
        ({"positions": ints(*[0] * 6)[::2]}, "positions must be contiguous"),
        (
            in_place(positions=ints(0, 4, 0)),
            "position 4 of token 1 is out of bounds for cos_sin_cache with 4 positions; nothing",
        ),
        (
            in_place(positions=ints(0, 3, -5, dtype=torch.int32)),
            "position -5 of token 2 is out of bounds",
        ),
        (in_place(**both), f"out_query {SHARED_WITH} out_key"),
        ({"query": shared[:, :16], "out_query": shared[:, 8:24]}, f"out_query {SHARED_WITH} query"),
        (
            in_place(query=shared[:, :16], cache=shared[:, 8:16]),
            f"out_query {SHARED_WITH} cos_sin_cache",
        ),
    ):
        yield op, changes, message
    for changes, message in (
        ({"query_weight": ones(4)}, "query_weight must have shape [8]"),
        ({"key_weight": ones(8, dtype=BF16)}, "key_weight must be float32"),
        ({"query_weight": ones(16)[::2]}, "query_weight must be contiguous"),
        ({"query_weight": within("out_query", 8)}, "must not share memory with query_weight"),
    ):
        yield "qk_norm_rope", changes, message


def caches() -> Iterator[Refusal]:
    for op, as_key in (("reshape_and_cache", (2, 8)), ("rope_reshape_and_cache", (16,))):
        for changes, message in (
            ({"slots": ints(0, 1, 2, 3, 4, 5, 64)}, "slot 64 of token 6 is not in a cache of 4"),
            ({"slots": ints(0, -2, 2, 3, 4, 5, 6)}, "slot -2 of token 1 is not in a cache"),
            ({"slots": ints(2**40, 1, 2, 3, 4, 5, 6)}, "slot 1099511627776 of token 0"),
            ({"slots": ints(1, 2)}, "key must have shape [2, kv_heads, head_size]"),
            ({"slots": torch.zeros(7)}, "slot_mapping must be int64"),
            ({"slots": ints(*range(14))[::2]}, "slot_mapping must be contiguous"),
            ({"slots": ints(*range(7))[:, None]}, "slot_mapping must have shape [tokens]"),
            ({"key_cache": ones(4, 2, 16, 9)}, "key_cache must have shape [blocks, 2, block_size,"),
            ({"key_cache": ones(4, 2, 8, 16).mT}, "key_cache must be contiguous"),
            ({"value_cache": ones(5, 2, 16, 8)}, "value_cache must have shape [4, 2, 16, head_siz"),
            ({"key_cache": ones(1, 2, 16, 8).expand(4, 2, 16, 8)}, "key_cache must not overlap"),
            ({"key_cache": lambda a: a["value_cache"]}, f"key_cache {SHARED_WITH} value_cache"),
            ({"key": within("key_cache", 7, *as_key)}, f"key_cache {SHARED_WITH} key"),
        ):
            yield op, changes, message
    yield "reshape_and_cache", {"key": ones(7, 2, 8, dtype=F64)}, "key must be float32"
    yield "reshape_and_cache", {"key": ones(7, 2, 16)[..., ::2]}, "key must be contiguous in its"
    yield "reshape_and_cache", {"value": ones(7, 2, 8).half()}, "value must have the dtype of k"
    for changes, message in (
        ({"query": ones(7, 32, dtype=F64)}, "query must be float32 or bfloat16"),
        ({"query": ones(7, 33)}, "query must have shape [..., heads * 8]"),
        ({"query": ones(6, 32)}, "query must have shape [*[7], heads * head_size]"),
        ({"key": ones(7, 16, dtype=F16)}, "key must have the dtype of query"),
        ({"key": ones(7, 24)}, "key_cache must have shape [blocks, 3, block_size, 8]"),
        ({"key": ones(16, 7).t()}, f"key must be {OF_LAST}"),
        ({"value": ones(7, 16)}, "value must have shape [7, kv_heads, head_size]"),
        ({"value": ones(7, 3, 8)}, "value_cache must have shape [blocks, 3, block_size"),
        ({"out": ones(7, 16)}, "out_query must have the shape of query"),
        ({"out": ones(1, 32).expand(7, 32)}, "out_query must not overlap itself"),
        ({"head_size": 0}, "head_size must be positive, found 0"),
        ({"table": ones(4, 10)}, "cos_sin_cache must have shape [max_position, r]"),
        ({"positions": ints(0, 0, 0, 64, 0, 0, 0)}, "position 64 of token 3 is out of b"),
        ({"positions": torch.zeros(7)}, "positions must be int64 or int32"),
        ({"positions": ints(*[0] * 7)[None]}, "positions must have shape [tokens]"),
        ({"query": within("key_cache", 7, 32)}, f"key_cache {SHARED_WITH} query"),
        ({"out": within("value_cache", 7, 32)}, f"out_query {SHARED_WITH} value_cache"),
        ({"key": lambda a: a["out"][:, :16]}, f"out_query {SHARED_WITH} key"),
        ({"value": lambda a: a["out"].view(7, 4, 8)[:, :2]}, f"out_query {SHARED_WITH} value"),
    ):
        yield "rope_reshape_and_cache", changes, message


def attention() -> Iterator[Refusal]:
    def with_block(value: int) -> Callable[[Arguments], Tensor]:
        def tables(a: Arguments) -> Tensor:
            changed: Tensor = a["tables"].clone()
            changed[0, 1] = value
            return changed

        return tables

    def i32(*values: int) -> Tensor:
        return ints(*values, dtype=torch.int32)

    rows = "cu_seqlens_q"
    for op in ("paged_attention", "attention_quant"):
        for changes, message in (
            ({"query": to("query", F64)}, "query must be float32 or bfloat16 or float16"),
            (
                {"query": lambda a: a["query"][0]},
                "query must have shape [tokens, heads, head_size]",
            ),
            ({"query": lambda a: a["query"][..., ::2]}, f"query must be {OF_LAST}"),
            (
                {"query": lambda a: a["query"][:, :3]},
                "query must have shape [tokens, a multiple of",
            ),
            (
                {"query": lambda a: a["query"][..., :32]},
                "key_cache must have shape [blocks, kv_hea",
            ),
            ({"key_cache": to("key_cache", F16)}, "key_cache must have the dtype of query"),
            ({"key_cache": lambda a: a["key_cache"][0]}, "key_cache must have shape [blocks, kv_h"),
            (
                {
                    "key_cache": lambda a: (
                        a["key_cache"].transpose(1, 2).contiguous().transpose(1, 2)
                    )
                },
                "key_cache must be contiguous",
            ),
            (
                {"value_cache": lambda a: a["value_cache"][:-1]},
                "value_cache must have shape [5, 2,",
            ),
            (
                {"key_cache": ones(5, 2, 8, 64), "value_cache": ones(5, 2, 8, 64)},
                "key_cache must have shape [blocks, kv_heads, a multiple of 16, head_size]",
            ),
            ({"tables": lambda a: a["tables"].long()}, "block_tables must be int32"),
            ({"tables": lambda a: a["tables"][0]}, "block_tables must have shape [sequences, blo"),
            ({"lengths": i32(20)}, "seq_lens must have shape [2]"),
            ({"starts": i32(0, 4)}, f"{rows} must have shape [3]"),
            ({"starts": i32(0, 1, 5)}, f"{rows} must go from 0 to at most 4, the number of q"),
            ({"starts": i32(1, 1, 4)}, f"{rows} must go from 0"),
            ({"starts": i32(0, 4, 2)}, f"sequence 1: its queries go from 4 to 2 in {rows}"),
            (
                {"lengths": i32(49, 3)},
                "sequence 0: its length is 49, but its table has 3 blocks of",
            ),
            ({"lengths": i32(20, -1)}, "sequence 1: its length is -1"),
            ({"tables": with_block(5)}, "block_tables[0, 1] is 5, but the cache has 5 blocks"),
            ({"tables": with_block(-1)}, "sequence 0: block_tables[0, 1] is -1"),
            ({"window": 0}, "window must be None or, with causal, positive, found 0"),
            ({"window": 3, "causal": False}, "window must be None or, with causal, positive, fou"),
            ({"soft_cap": 0.0}, "soft_cap must be None or positive, found 0"),
            ({"soft_cap": NAN}, "soft_cap must be None or positive, found "),
        ):
            yield op, changes, message
    yield "paged_attention", {"out": ones(4, 4, 63)}, "out must have shape [4, 4, 64]"
    yield "paged_attention", {"out": ones(4, 4, 128)[..., ::2]}, "out must be contiguous"
    yield "paged_attention", {"out": lambda a: a["query"]}, f"out {SHARED_WITH} query"
    quant = "attention_quant"
    yield quant, {"out": ones(4, 256)}, "out must be float8_e4m3fn"
    yield quant, {"out": codes(4, 4, 64)}, "out must have shape [4, 256]"
    yield quant, {"out": codes(4, 512)[:, ::2]}, "out must be contiguous"
    yield quant, {"out": within("query", 4, 256, dtype=FP8)}, f"out {SHARED_WITH} query"
    yield quant, {"out_scale": ones(2)}, "out_scale must have one element"
    yield quant, {"out_scale": ones(1, dtype=F64)}, "out_scale must be float32"


REFUSED = [
    refusal
    for family in (norms, activations, quantization, linear_layers, rotation, caches, attention)
    for refusal in family()
]


def changed(op: str, changes: Arguments) -> tuple[Any, ...]:
    """Return the arguments of *op* with changes, of which a function gets the earlier ones."""
    arguments = BASES[op]()
    assert changes.keys() <= arguments.keys()
    for name, value in changes.items():
        arguments[name] = value(arguments) if callable(value) else value
    return tuple(arguments.values())


@pytest.mark.parametrize("op", BASES)
def test_accepted_arguments(module: ModuleType, op: str) -> None:
    """The arguments that refused ones are changed from work, and the torch op is sound."""
    for name in CALL_PATHS:
        call_path(module, name, op)(*changed(op, {}))
    torch.library.opcheck(
        getattr(torch.ops.opweave_c, op).default,
        changed(op, {}),
        # torch compares the tensors that an op writes, but has no code for float8.
        test_utils=["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"],
    )


def test_every_op_has_arguments_here(module: ModuleType) -> None:
    ops = {name for name in dir(module) if not name.startswith(("_", "misuse"))}
    assert ops - {"advance_step_flashattn"} == BASES.keys()  # see test_advance_step.py


@pytest.mark.parametrize(
    ("op", "changes", "expected"), REFUSED, ids=[f"{op}: {text[:40]}" for op, _, text in REFUSED]
)
def test_refusals(module: ModuleType, op: str, changes: Arguments, expected: str) -> None:
    messages = []
    for name in CALL_PATHS:
        arguments = changed(op, changes)
        before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        with pytest.raises(RuntimeError) as error:
            call_path(module, name, op)(*arguments)
        messages.append(str(error.value))
        for argument, copy in zip(arguments, before, strict=True):
            if isinstance(copy, Tensor):
                torch.testing.assert_close(argument, copy, atol=0, rtol=0, equal_nan=True)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{op}: ")
    assert expected in messages[0]


def test_inputs_may_share_memory(module: ModuleType) -> None:
    shared = ones(3, 40)
    changes = {"query": shared[:, :16], "key": shared[:, 8:16]}
    module.rotary_embedding(*changed("rotary_embedding", changes))


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (ir.ops.gelu_and_mul, (ones(2, 8), "erf"), "not 'erf'"),
        (ir.ops.gelu_and_mul_sparse, (ones(2, 8), 1.0, "erf"), "not 'erf'"),
        (ir.ops.silu_and_mul, (ones(2, 7),), "even"),
        (ir.ops.xielu, (ones(2, 8), ones(2), ones(1)), "one element"),
        (ir.ops.rms_norm_gated, (ones(2, 8), None, None, 1e-5, 3), "group_size=3 does not divide"),
        (
            ir.ops.rms_norm_gated,
            (ones(2, 8), None, ones(2, 8), 1e-5, None, False, "relu"),
            "one of silu, swish, sigmoid; found 'relu'",
        ),
        (ir.ops.rms_norm_gated, (ones(2, 8), None, ones(8), 1e-5), "z must have the shape of x"),
        (ir.ops.static_quant_fp8, (ones(4, 6), ones(6)), "scale must have one element, or shape"),
        (ir.ops.static_quant_int8, (ones(4, 6), ones(5, 1)), "a divides the rows of x"),
        (ir.ops.per_token_group_quant_fp8, (ones(4, 6), 0), "group_size must be at least 1"),
        (ir.ops.dynamic_per_token_quant_fp8, (torch.tensor(1.0),), "at least one dimension"),
        (ir.ops.dynamic_per_token_quant_fp8, (ones(4, 6), ones(2)), "scale_ub must have one elem"),
        (ir.ops.silu_and_mul_static_quant_fp8, (ones(4, 5), ones(1)), "must be even"),
        (ir.ops.rms_norm_static_quant_fp8, (ones(4, 6), None, 1e-6, ones(5)), "scale must have on"),
        (
            ir.ops.linear_w8a16,
            (ones(2, 8), ones(3, 8).to(INT8), ones(1, 3)),
            r"weight has shape \(3, 8\), scale \(1, 3\)",
        ),
        (ir.ops.linear_w8a16, (ones(2, 8), ones(3, 8), ones(3)), "found float32. .* use linear"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_error_of_the_op_stays(
    module: ModuleType, op: IrOp, arguments: tuple[Any, ...], message: str
) -> None:
    """opweave_c rejects arguments that native refuses, so that native's error is raised."""
    with ir.priority({op.name: ["opweave_c"]}), pytest.raises(ValueError, match=message):
        op(*arguments)


DEFINITIONS: list[tuple[str, Arguments, type[Exception], str]] = [
    ("reshape_and_cache", {"slots": ints(0, 1, 2, 3, 4, 5, 64)}, IndexError, "out of"),
    ("reshape_and_cache", {"slots": ints(0, -2, 2, 3, 4, 5, 6)}, IndexError, "out of"),
    ("reshape_and_cache", {"slots": torch.zeros(7)}, ValueError, "slot_mapping must be int64"),
    ("reshape_and_cache", {"key": ones(7, 1, 8)}, ValueError, r"key must be \(7, 2, 8\)"),
    ("reshape_and_cache", {"key_cache": ones(4, 8)}, ValueError, "key_cache must be"),
    ("reshape_and_cache", {"value_cache": ones(5, 2, 16, 8)}, ValueError, "value_cache must be fl"),
    (
        "reshape_and_cache",
        {"value": ones(7, 2, 8).half()},
        ValueError,
        "value_cache must be float1",
    ),
    ("rope_reshape_and_cache", {"positions": ints(*[0] * 6, 64)}, IndexError, "out of"),
    ("rope_reshape_and_cache", {"key": ones(7, 24)}, ValueError, r"key must be \(7, 2, 8\)"),
    ("rope_reshape_and_cache", {"value": ones(7, 16)}, ValueError, r"value must be \(7, 2, 8\)"),
    (
        "rope_reshape_and_cache",
        {"table": ones(64, 10)},
        ValueError,
        "cannot rotate 10 dimensions o",
    ),
    ("paged_attention", {"query": lambda a: a["query"][0]}, ValueError, "query must be"),
    (
        "paged_attention",
        {"query": to("query", F16)},
        ValueError,
        "key_cache must be float16, as qu",
    ),
    ("paged_attention", {"value_cache": ones(4, 2, 16, 64)}, ValueError, "value_cache must be"),
    (
        "paged_attention",
        {"tables": lambda a: a["tables"].long()},
        ValueError,
        "block_tables must be",
    ),
    ("paged_attention", {"lengths": ints(20)}, ValueError, r"seq_lens must be int32, \(2,\)"),
    ("paged_attention", {"starts": ints(0, 4)}, ValueError, r"cu_seqlens_q must be int32, \(3,\)"),
    ("paged_attention", {"window": 3, "causal": False}, ValueError, "window needs causal=True"),
    ("attention_quant", {"query": lambda a: a["query"][:, :3]}, ValueError, "3 query heads, 2 key"),
    (
        "attention_quant",
        {"out_scale": ones(3)},
        ValueError,
        "scale must have one element, or shape",
    ),
    ("attention_quant", {"window": 0}, ValueError, "window=0 is not positive"),
]


@pytest.mark.parametrize(("name", "changes", "error", "message"), DEFINITIONS)
def test_errors_of_the_definition(
    name: str, changes: Arguments, error: type[Exception], message: str
) -> None:
    arguments = changed(name, changes)
    of_op = arguments if name == "reshape_and_cache" else arguments[1:]  # without out
    parts = ("rotary_embedding", "reshape_and_cache", "paged_attention", "static_quant_fp8")
    with ir.priority({part: ["native"] for part in parts}), pytest.raises(error, match=message):
        getattr(ir.ops, name).native(*of_op)
