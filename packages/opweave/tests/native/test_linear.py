"""Linear layers: which kernel or library multiplies, many tokens, weights that are widened."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from opweave.ir.ops.linear import linear, linear_w8a16
from opweave.kernels.opweave_c import linear as provider
from support.fixtures import FreshPython

from .oracle import CALL_PATHS, DTYPES, assert_op_close, call_path, random, using_threads

INT8, FP8 = torch.int8, torch.float8_e4m3fn
W8 = (INT8, FP8)
LARGE_PAGE = 2 << 20  # bytes
slow = pytest.mark.slow


def weights_of(dtype: torch.dtype, rows: int, columns: int, seed: int = 1) -> Tensor:
    """Weights whose products with tokens of variance 1 have sums of about that size."""
    values = random(rows, columns, dtype=torch.float32, seed=seed) / math.sqrt(max(columns, 1))
    return (values * 100).to(dtype) if dtype in W8 else values.to(dtype)


def at_large_page(weight: Tensor) -> Tensor:
    """Return a copy that begins where a page of 2 MiB does, as the weights of the engine do."""
    memory = torch.empty(weight.nbytes + LARGE_PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % LARGE_PAGE
    copy = memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
    return copy.copy_(weight)


def scale_of(kind: str, rows: int) -> Tensor:
    shape = {"tensor": (1,), "number": (), "rows": (rows,), "column": (rows, 1)}[kind]
    return 0.01 + 0.01 * torch.rand(shape, generator=torch.Generator().manual_seed(3))


def oracle(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """In float64; rounded once."""
    wide = weight.float().double()
    if scale is not None:
        wide = wide * scale.double().reshape(-1, 1)
    out = x.double() @ wide.T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def call(module: ModuleType, name: str, out: Tensor, *arguments: Any) -> Tensor:
    """Call the op for (x, weight, scale or None, bias)."""
    x, weight, scale, bias = arguments
    if scale is None:
        call_path(module, name, "linear")(out, x, weight, bias)
    else:
        call_path(module, name, "linear_w8a16")(out, x, weight, scale, bias)
    return out


def by_many(
    module: ModuleType,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    fewest: int = 0,
) -> Tensor:
    """By the kernel for many tokens, if there are *fewest* of them; both call paths."""
    outs = [torch.full((*x.shape[:-1], weight.shape[0]), 7.0, dtype=x.dtype) for _ in CALL_PATHS]
    for name, out in zip(CALL_PATHS, outs, strict=True):
        if scale is None:
            call_path(module, name, "linear_many")(out, x, weight, bias, fewest)
        else:
            call_path(module, name, "linear_w8a16_many")(out, x, weight, scale, bias, fewest)
    assert torch.equal(outs[0].nan_to_num(9.0), outs[1].nan_to_num(9.0))
    return outs[0]


def run(module: ModuleType, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    out = torch.full((*x.shape[:-1], weight.shape[0]), 7.0, dtype=x.dtype)
    return call(module, "direct", out, x, weight, scale, None)


def widened(module: ModuleType, name: str, weight: Tensor, scale: Tensor) -> Tensor:
    out = torch.full(weight.shape, 7.0)
    call_path(module, name, "widen_rows")(out, weight, scale)
    return out


def provided(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    result: Tensor = (
        provider.linear(x, weight, bias)
        if scale is None
        else provider.linear_w8a16(x, weight, scale, bias)
    )
    return result


def native(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    result: Tensor = (
        linear.native(x, weight, bias)
        if scale is None
        else linear_w8a16.native(x, weight, scale, bias)
    )
    return result


def near(got: Tensor, wanted: Tensor) -> None:
    assert_op_close(linear, got, wanted, share=0)


# Values that are not usual, and scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["tensor", "number", "rows", "column"])
def test_scales(module: ModuleType, isa: str, kind: str, dtype: torch.dtype) -> None:
    for weight_dtype in W8:
        x, weight = random(3, 40, dtype=dtype), weights_of(weight_dtype, 21, 40)
        for bias in (None, random(21, dtype=dtype), random(21, dtype=torch.float32)):
            arguments = (x, weight, scale_of(kind, 21), bias)
            near(provided(*arguments), oracle(*arguments))


def test_every_code_of_8_bits(module: ModuleType, isa: str) -> None:
    """In every lane, and in tails; denormals and NaN included."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for dtype in W8:
        for columns in (1, 33):
            weight = torch.zeros(256, columns, dtype=torch.uint8)
            for column in range(columns):
                weight.zero_()[:, column] = codes
                x = torch.zeros(1, columns)
                x[0, column] = 1.0
                wanted = codes.view(dtype).float()
                for kernel in (run, by_many):
                    got = kernel(module, x, weight.view(dtype), torch.ones(1))[0]
                    assert torch.equal(got.nan_to_num(9e9), wanted.nan_to_num(9e9))


# Layouts


# Many tokens: panels, tiles

MANY_SIZES = [
    (rows, columns, tokens)
    for rows, columns in [(1, 1), (15, 31), (16, 32), (17, 33), (33, 511), (40, 513), (161, 100)]
    for tokens in (0, 1, 15, 16, 17, 32, 33, 48, 255, 256, 257)
]
MANY_SIZES += [(129, 1100, 50), (300, 70, 520), (0, 8, 3), (8, 0, 3)]
MANY_SIZES += [
    (rows, columns, tokens)
    for rows, columns in [(7, 255), (8, 256), (9, 257), (24, 520)]
    for tokens in (5, 6, 7, 12, 251, 252, 253, 504, 505)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["same", *W8], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [MANY_SIZES[::7], pytest.param(MANY_SIZES, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_values_of_many_tokens(
    module: ModuleType, isa: str, sizes: list[tuple[int, int, int]], kind: Any, dtype: torch.dtype
) -> None:
    """Sizes that are whole tiles, panels, blocks and calls, and sizes that are not."""
    for rows, columns, tokens in sizes:
        with using_threads(1 + (rows + tokens) % 2):
            x = random(tokens, columns, dtype=dtype)
            weight = weights_of(dtype if kind == "same" else kind, rows, columns)
            scale = scale_of("rows" if tokens % 3 else "tensor", rows) if kind != "same" else None
            biases = (None, random(rows, dtype=dtype), random(rows, dtype=torch.float32))
            arguments = (x, weight, scale, biases[tokens % 2 + rows % 2])
            near(by_many(module, *arguments), oracle(*arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens_lose_no_bits(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """Every part counts: a row of weights has one that is not zero, so that nothing is rounded."""
    x = random(40, 80, dtype=dtype) * 2.0 ** torch.arange(-7, 9).repeat(5).to(dtype)
    x[3, :3] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 2.0**-14])
    weight = torch.eye(80).to(INT8)
    assert torch.equal(by_many(module, x, weight.to(dtype)), x)
    assert torch.equal(by_many(module, x, weight, torch.ones(1)), x)
    assert torch.equal(by_many(module, x, weight.to(FP8), torch.ones(1)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["same", *W8], ids=str)
@pytest.mark.parametrize("columns", [33, 513])
def test_what_is_not_finite_stays_in_its_row_of_many(
    module: ModuleType, isa: str, columns: int, kind: Any, dtype: torch.dtype
) -> None:
    """Of the tokens and the weights, and of memory next to them."""
    for tokens in (2, 16, 40):
        whole_x = random(tokens, columns + 40, dtype=dtype)
        whole_x[:, columns:] = torch.nan
        whole = weights_of(W8[0], 34, columns + 40).to(dtype if kind == "same" else kind)
        if kind != INT8:
            whole[:, columns:] = torch.nan
            whole[3, columns - 1] = torch.nan
        x, weight = whole_x[:, :columns], whole[:, :columns]
        scale = None if kind == "same" else scale_of("rows", 34)
        weight[5, columns - 1] = 0.0
        assert by_many(module, x, weight, scale).isnan().any(dim=0).sum() == (kind != INT8)
        x[1, columns - 1] = -torch.inf
        got = by_many(module, x, weight, scale)
        near(got, oracle(x, weight, scale, None))
        assert got[1, 5].isnan()  # infinity times zero
        x[1, columns - 1] = torch.nan
        got = by_many(module, x, weight, scale)
        assert got.isnan().all(dim=1).nonzero().tolist() == [[1]]


def test_a_nan_stays_one_among_many(module: ModuleType, isa: str) -> None:
    bits = torch.tensor([0x7F800001, 0x3F800000, -0x7FFFFF], dtype=torch.int32)
    x = bits.view(torch.float32)[:, None].repeat(1, 4)
    for got in (
        by_many(module, x, torch.ones(2, 4)),
        by_many(module, x, torch.ones(2, 4, dtype=INT8), torch.ones(1)),
    ):
        assert got.isnan().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_tokens_keep_their_kernel(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """The op chooses when it runs, by the number of tokens: not by that of elements."""
    weight, q, scale = weights_of(dtype, 40, 1030), weights_of(INT8, 40, 1030), scale_of("rows", 40)
    for tokens in (1, 15, 16, 17):
        x = random(tokens, 1030, dtype=dtype)
        for some, factor in ((weight, None), (q, scale)):
            wanted = (
                run(module, x, some, factor) if tokens < 16 else by_many(module, x, some, factor)
            )
            assert torch.equal(by_many(module, x, some, factor, fewest=16), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["linear_many", "linear_w8a16_many"])
def test_the_op_for_many_tokens_is_called_where_there_is_one(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    calls: list[tuple[int, int]] = []

    def counted(out: Tensor, x: Tensor, *rest: Any) -> None:
        calls.append((len(x), rest[-1]))

    is_w8 = name == "linear_w8a16_many"
    weight = weights_of(INT8 if is_w8 else dtype, 6, 8)
    monkeypatch.setattr(provider, f"_{name}", counted)
    for fewest in ({}, {dtype: 5}):
        monkeypatch.setattr(provider, "_MIN_TOKENS_W8" if is_w8 else "_MIN_TOKENS", fewest)
        for tokens in (1, 600):
            provided(
                random(tokens, 8, dtype=dtype), weight, scale_of("rows", 6) if is_w8 else None, None
            )
    assert calls == [(1, 5), (600, 5)]


# Weights of 8 bits, widened for torch


@pytest.mark.parametrize("kind", ["tensor", "number", "rows", "column"])
@pytest.mark.parametrize("dtype", W8, ids=str)
def test_widened_rows_are_those_of_the_definition(
    module: ModuleType, isa: str, dtype: torch.dtype, kind: str
) -> None:
    """To the bit, with every code in every lane; also where only the product is a usual number."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    whole = codes.expand(40, 256)[:, :200].contiguous()
    layouts = [whole[:11, shift : shift + 70 + shift % 5] for shift in range(40)]
    layouts += [whole, whole[::3, 3:], whole[:1].expand(11, 200), whole[:0], whole[:, :0]]
    for weight in layouts:
        scale = scale_of(kind, len(weight))
        for factor in (1.0, 2e38, 1e-38):
            wanted = weight.float() * (scale * factor).reshape(-1, 1)
            for name in CALL_PATHS:
                got = widened(module, name, weight, scale * factor)
                assert torch.equal(got.isnan(), wanted.isnan())
                assert torch.equal(
                    got.nan_to_num(9.0).view(torch.int32), wanted.nan_to_num(9.0).view(torch.int32)
                )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weight_dtype", "threads"), [(INT8, 2), (FP8, 1)], ids=str)
def test_pieces(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """Whole pieces, a last one that is shorter, and one that is longer than the weights.

    A piece has 20 rows for each thread, or as many as there are tokens: 18, or 36.
    """
    monkeypatch.setattr(provider, "_MIN_TOKENS_W8", {})
    monkeypatch.setattr(provider, "_PIECE", 70 * 20)
    monkeypatch.setattr(provider, "_MIN_ROWS", 10)
    monkeypatch.setattr(provider, "_MAX_TOKENS_W8", dict.fromkeys(DTYPES, 8))
    whole = random(18, 2, 80, dtype=dtype)
    with using_threads(threads):
        for rows, kind in ((40, "rows"), (47, "column"), (5, "rows"), (1, "rows"), (47, "tensor")):
            weight, scale = weights_of(weight_dtype, 2 * rows, 75)[::2, 5:], scale_of(kind, rows)
            for x in (whole[:, 1, :70], whole[:9, :, 10:], whole.transpose(0, 1)[..., :70]):
                for bias in (None, random(rows, dtype=dtype), random(rows, dtype=torch.float32)):
                    got = provided(x, weight, scale, bias)
                    near(got, oracle(x, weight, scale, bias))
                    assert got.stride() == native(x, weight, scale, bias).stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", W8, ids=str)
def test_many_tokens_multiply_what_our_kernel_widened(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    weight_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    calls: list[int] = []

    def counted(out: Tensor, weight: Tensor, scale: Tensor) -> None:
        calls.append(len(weight))
        out.copy_(weight.float() * scale.reshape(-1, 1))

    monkeypatch.setattr(provider, "_MIN_TOKENS_W8", {})
    monkeypatch.setattr(provider, "_widen_rows", counted)
    weight, scale, most = weights_of(weight_dtype, 6, 8), scale_of("rows", 6), limit_of(dtype)
    for tokens in (1, most, most + 1, 600):
        provided(random(tokens, 8, dtype=dtype), weight, scale, None)
    assert calls == [6, 6]


def limit_of(dtype: torch.dtype) -> int:
    most: int = provider._MAX_TOKENS_W8[dtype]
    return most


# Batches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [run, by_many], ids=["few", "many"])
def test_a_row_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, kernel: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    x = random(300, 1030, dtype=dtype)
    for kind in (dtype, *W8):
        weight = weights_of(kind, 530, 1030)
        scale = None if kind == dtype else scale_of("rows", 530)
        with using_threads(2):
            whole = kernel(module, x, weight, scale)
        for count in (1, 2, 3, 4, 5, 17, 33, 280):
            part = slice(7, 7 + count)
            assert torch.equal(kernel(module, x[part], weight, scale), whole[part])
        some = None if scale is None else scale[3:40]
        assert torch.equal(kernel(module, x, weight[3:40], some), whole[:, 3:40])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [40, 6200])
def test_bits_do_not_depend_on_where_the_weights_are(
    module: ModuleType, isa: str, columns: int, dtype: torch.dtype
) -> None:
    x = random(2, columns, dtype=dtype)
    for rows in (15, 67, 130):
        weight = weights_of(dtype, rows, columns)
        moved = at_large_page(weight)
        assert weight.data_ptr() % LARGE_PAGE != 0
        assert moved.data_ptr() % LARGE_PAGE == 0
        wanted = run(module, x, weight, None)
        for tokens in (slice(0, 1), slice(1, 2), slice(0, 2)):
            assert torch.equal(run(module, x[tokens], moved, None), wanted[tokens])


def test_layouts_of_many_tokens() -> None:
    """Whichever library of torch computes: every layout that the rules admit."""
    wide = random(40, 2, 60, dtype=torch.float32)
    xs = (wide[:, 1, :37], wide[..., :37], wide.transpose(0, 1)[..., 3:40], wide[::2, :, :37])
    whole, bias = weights_of(torch.float32, 22, 50), random(11, dtype=torch.float32)
    weights = (whole[:11, :37], whole[::2, 13:], whole[:1, :37].expand(11, 37))
    repeated = xs[0][:1].expand(40, 37)
    for x, weight in ((x, weight) for x in (*xs, repeated) for weight in weights):
        for given in (None, bias):
            got = provided(x, weight, None, given)
            near(got, oracle(x, weight, None, given))
            assert got.stride() == native(x, weight, None, given).stride()


@pytest.mark.slow
def test_torch_multiplies_16_bits_on_other_architectures(fresh_python: FreshPython) -> None:
    """The machine is faked; the result of torch for one token tells which kernel ran."""
    fresh_python("""
        import platform
        platform.machine = lambda: "aarch64"
        import torch
        from opweave.kernels.opweave_c import linear as provider
        from opweave import ir
        ran = []
        provider._linear = lambda *arguments: ran.append(arguments[1].dtype)
        with torch.no_grad():
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for tokens in (1, 4, 64):
                    x, w = torch.randn(tokens, 96).to(dtype), torch.randn(40, 96).to(dtype)
                    y = ir.ops.linear(x, w)
                    if dtype is not torch.float32:
                        assert torch.equal(y, torch.nn.functional.linear(x, w)), (dtype, tokens)
        assert ran == [torch.float32] * 2, ran  # 1 and 4 tokens, which the fake leaves unwritten
    """)


def test_onednn_is_used_if_the_user_lets_torch_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(provider, "_MIN_TOKENS", {})
    monkeypatch.setattr(provider, "_HAS_ONEDNN", True)
    monkeypatch.setattr(provider.torch_compat, "onednn_linear", counted)
    weight = weights_of(torch.float32, 6, 8)
    for is_enabled in (False, True):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", is_enabled)
        assert not calls
        for tokens in (1, 32, 33, 512):
            x = random(tokens, 8, dtype=torch.float32)
            provider.linear(x, weight)
            provider.linear(x.bfloat16(), weight.bfloat16())
    assert calls == [33, 512]


# Values that are not finite, or huge


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [31, 32, 34])
def test_a_tokens_nan_stays_its_own(columns: int, dtype: torch.dtype) -> None:
    """torch's product of bfloat16 lets it into the token before on CPUs with AMX."""
    x, weight = random(40, columns, dtype=dtype), weights_of(dtype, 17, columns)
    for size in (2, 8, 40):
        some = x[:size].clone()
        some[1] = torch.nan
        got = linear.using("opweave_c!")(some, weight)
        assert got.isnan().any(dim=-1).nonzero().tolist() == [[1]]


# Arguments


# Graphs


def nodes_of_a_graph(dtype: torch.dtype) -> list[str]:
    """The number of tokens in a graph of Dynamo's (symbolic), and in one of make_fx."""
    x, weight, scale = random(600, 24, dtype=dtype), weights_of(INT8, 6, 24), scale_of("rows", 6)
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(provider.linear_w8a16, backend=backend, fullgraph=True, dynamic=False)
    near(compiled(x, weight, scale), native(x, weight, scale, None))
    traced = make_fx(lambda x: provider.linear_w8a16(x, weight, scale))(x)
    nodes.extend(str(node.target) for node in traced.graph.nodes)
    assert nodes
    return [node for node in nodes if "opweave" in node]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_of_many_tokens_has_the_definition(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The compiler widens the weights while it reads them; pieces would be hidden from it."""
    monkeypatch.setattr(provider, "_MIN_TOKENS_W8", {})
    assert not nodes_of_a_graph(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_of_many_tokens_has_their_kernel(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The compiler would multiply in float32."""
    monkeypatch.setattr(provider, "_MIN_TOKENS_W8", {dtype: 5})
    assert set(nodes_of_a_graph(dtype)) == {"opweave_c.linear_w8a16_many.default"}
