"""Attention of every provider: nothing but what a query sees reaches its result."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from ir.workloads import check, each_dtype
from opweave import ir
from opweave.ir import selection
from opweave.ir.errors import ProviderRejectedError
from opweave.kernels.arguments import FLOATS

NAN = math.nan
VARLEN, CAUSAL, PAGED = ir.ops.varlen_attention, ir.ops.causal_attention, ir.ops.paged_attention
each_provider = pytest.mark.parametrize("provider", VARLEN.supported_providers())


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(tokens: int = 7) -> list[Tensor]:
    query = torch.randn(tokens, 4, 8)
    return [query, *torch.randn(2, tokens, 2, 8)]


@pytest.fixture(autouse=True)
def _no_grad(request: pytest.FixtureRequest) -> Any:
    with torch.set_grad_enabled("grad" in request.node.name):
        yield


@each_provider
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_sequence_never_reaches_another(
    provider: str, causal: bool, which: str, bad: float
) -> None:
    """The second of three sequences, and what comes after the last."""
    arguments, cu = packed(9), ints(0, 2, 5, 7)
    attend = VARLEN.using(f"{provider}!")
    clean = attend(*arguments, cu, cu, None, causal)
    spoilt = arguments[("query", "key", "value").index(which)]
    spoilt[3], spoilt[7:] = bad, NAN
    found = attend(*arguments, cu, cu, None, causal)
    for rows in (slice(0, 2), slice(5, 9)):
        assert torch.equal(found[rows], clean[rows])
    if which == "value":
        assert torch.equal(found[2:3], clean[2:3]) == causal
        assert found[4].isclose(torch.tensor(bad), equal_nan=True).all()


@each_provider
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("window", [None, 2])
def test_a_later_token_reaches_none_before_it(
    provider: str, which: str, window: int | None
) -> None:
    """With keys before the queries, as in a chunk of a prompt."""
    query, key, value = packed(20)
    rest = (ints(0, 8, 9), ints(0, 17, 20), None, True, window)
    attend = VARLEN.using(f"{provider}!")
    clean = attend(query[:9], key, value, *rest)
    (key if which == "key" else value)[13] = NAN  # the fifth query's
    found = attend(query[:9], key, value, *rest)
    seen = [4, 5] if window else [4, 5, 6, 7]
    others = [i for i in range(9) if i not in seen]
    torch.testing.assert_close(found[others], clean[others])
    assert found[seen].isnan().all()


def test_what_a_dense_query_does_not_see_adds_nothing_to_native() -> None:
    query, key, value = torch.randn(3, 2, 5, 2, 8)
    clean = CAUSAL.native(query, key, value)
    key[0, 3], value[0, 3, 0, 0] = NAN, NAN
    found = CAUSAL.native(query, key, value)
    assert torch.equal(found[1], clean[1])
    assert torch.equal(found[0, :3], clean[0, :3])
    assert found[0, 3:].isnan().all()


def test_infinite_values_stay_infinite_in_native() -> None:
    query, key, value = torch.randn(3, 1, 4, 1, 8)
    value[0, 1, 0, 0], value[0, 2, 0, 1], value[0, 2, 0, 0] = math.inf, -math.inf, -math.inf
    found = CAUSAL.native(query, key, value)[0, :, 0]
    assert found[0].isfinite().all()
    assert found[1, 0] == math.inf
    assert found[2, 0].isnan()
    assert found[2, 1] == found[3, 1] == -math.inf
    assert found[:, 2:].isfinite().all()


@pytest.mark.parametrize("provider", PAGED.supported_providers())
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_a_cached_sequence_never_reaches_another(provider: str, which: int) -> None:
    caches = torch.randn(2, 4, 2, 16, 8)
    rest = (ints(1, 2)[:, None], ints(3, 5), ints(0, 1, 3))
    attend, query = PAGED.using(f"{provider}!"), torch.randn(4, 4, 8)
    clean = attend(query, *caches, *rest)
    caches[which, 2, :, 4] = NAN  # the last position of the second sequence
    caches[:, 1, :, 3:] = NAN  # after the first sequence
    found = attend(query, *caches, *rest)
    for row in (0, 1, 3):
        if provider == "aten[prompt=1]":  # it repeats such rows by the definition, which rounds
            torch.testing.assert_close(found[row], clean[row])  # sums differently
        else:
            assert torch.equal(found[row], clean[row])
    assert found[2].isnan().all()


@pytest.mark.parametrize("provider", PAGED.supported_providers())
def test_a_used_block_of_a_negative_number_is_no_block(provider: str) -> None:
    arguments = torch.randn(2, 2, 8), *torch.randn(2, 3, 1, 16, 8)
    attend = PAGED.using(f"{provider}!")
    unused = attend(*arguments, ints(1, -1)[None], ints(5), ints(0, 2))
    assert torch.equal(unused, attend(*arguments, ints(1, 0)[None], ints(5), ints(0, 2)))
    for block in (-1, -3, 3):
        with pytest.raises(IndexError if provider == "native" else RuntimeError):
            attend(*arguments, ints(block)[None], ints(5), ints(0, 2))


@each_dtype
@each_provider
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -1e-40, 1e-40])
def test_any_scale(provider: str, scale: float, dtype: torch.dtype) -> None:
    for q_len, k_len, window in [(4, 4, None), (4, 6, None), (1, 4, None), (6, 4, 2)]:
        query = torch.randn(2, q_len, 4, 8).to(dtype)
        key, value = torch.randn(2, 2, k_len, 2, 8).to(dtype)
        expected = CAUSAL.native(query, key, value, scale, window)
        check(CAUSAL, CAUSAL.using(f"{provider}!")(query, key, value, scale, window), expected)
        cu = ints(0, q_len), ints(0, k_len)
        rows = VARLEN.using(f"{provider}!")(query[0], key[0], value[0], *cu, scale, True, window)
        check(VARLEN, rows, expected[0])


@each_provider
def test_tokens_of_no_sequence_are_zeros(provider: str) -> None:
    none = ints(0)
    attend = VARLEN.using(f"{provider}!")
    assert torch.equal(attend(*packed(), none, none), torch.zeros(7, 4, 8))
    assert attend(*packed(0), none, none).shape == (0, 4, 8)


@pytest.mark.parametrize("provider", PAGED.supported_providers())
def test_tokens_of_no_cached_sequence_are_zeros(provider: str) -> None:
    caches = torch.randn(2, 3, 2, 16, 8)
    attend = PAGED.using(f"{provider}!")
    found = attend(torch.randn(7, 4, 8), *caches, ints()[:, None].expand(0, 2), ints(), ints(0))
    assert torch.equal(found, torch.zeros(7, 4, 8))


def test_gradients_where_a_hidden_value_is_nan() -> None:
    query, key, value = (t.requires_grad_() for t in packed())
    cu = ints(0, 3, 6)
    with torch.no_grad():
        value[4], value[6] = NAN, NAN
    VARLEN(query, key, value, cu, cu, None, True)[:4].sum().backward()
    for leaf in (query, key, value):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    alone = [t.detach()[:3].requires_grad_() for t in (query, key, value)]
    VARLEN(*alone, cu[:2], cu[:2], None, True).sum().backward()
    for leaf, own in zip((query, key, value), alone, strict=True):
        torch.testing.assert_close(leaf.grad[:3], own.grad)


# Gradients of the provider ``aten``: those of the definition.

BIDIRECTIONAL = ir.ops.bidirectional_attention
each_gradient_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def gradients(call: Any, arguments: tuple[Tensor, ...], *rest: Any) -> list[Tensor]:
    """Return the result, and the gradients of its product with fixed weights."""
    leaves = [t.detach().clone().requires_grad_() for t in arguments]
    result = call(*leaves, *rest)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(7))
    (result * weights).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def check_gradients(op: ir.IrOp, arguments: tuple[Tensor, ...], *rest: Any) -> None:
    expected = gradients(op.native, arguments, *rest)
    for call in (op, op.torch_op):
        torch.testing.assert_close(gradients(call, arguments, *rest), expected)


def chosen(op: ir.IrOp, arguments: tuple[Tensor, ...], *rest: Any) -> str:
    return op.dispatch(*(t.detach().requires_grad_() for t in arguments), *rest).provider


@each_gradient_dtype
@pytest.mark.parametrize("lengths", [(5, 5), (2, 5), (5, 2), (1, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_gradients_of_a_dense_batch(
    kv_heads: int, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    q_len, k_len = lengths
    sizes = (q_len, 4, 8), (k_len, kv_heads, 8), (k_len, kv_heads, 6)
    arguments = tuple(torch.randn(2, *size, dtype=dtype) for size in sizes)
    for window, scale in [(None, None), (2, 0.3), (None, -1.0)]:
        assert chosen(CAUSAL, arguments, scale, window) == "aten"
        check_gradients(CAUSAL, arguments, scale, window)
    check_gradients(CAUSAL, arguments, None, None, 2.0)
    assert chosen(CAUSAL, arguments, None, None, 2.0) == "native", "it has no soft cap"
    assert chosen(BIDIRECTIONAL, arguments) == "aten"
    check_gradients(BIDIRECTIONAL, arguments)


@each_gradient_dtype
@pytest.mark.parametrize(
    ("starts", "ends"),
    [((0, 2, 5), (0, 2, 5)), ((0, 2, 7), (0, 4, 8)), ((0, 0, 3), (0, 1, 1)), ((0,), (0,))],
    ids=str,
)
def test_gradients_of_packed_sequences(
    starts: tuple[int, ...], ends: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Also of tokens after the last sequence, and of queries without keys."""
    arguments = tuple(torch.randn(7 + i, 4 - 2 * i, 8, dtype=dtype) for i in (0, 1, 1))
    for causal, window in [(False, None), (True, None), (True, 2)]:
        rest = ints(*starts), ints(*ends), None, causal, window
        assert chosen(VARLEN, arguments, *rest) == "aten"
        check_gradients(VARLEN, arguments, *rest)


def test_gradients_need_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_warned", False)
    cu = ints(0, 3, 7)
    for op, rest in [(CAUSAL, ()), (BIDIRECTIONAL, ()), (VARLEN, (cu, cu))]:
        op.reset()
        arguments = [t if op is VARLEN else t[None] for t in packed()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            op(*(t.requires_grad_() for t in arguments), *rest).sum().backward()


def test_gradients_by_finite_differences() -> None:
    query, key, value = (
        torch.randn(1, n, h, 4, dtype=torch.float64, requires_grad=True)
        for n, h in [(4, 2), (5, 1), (5, 1)]
    )
    assert torch.autograd.gradcheck(lambda *t: CAUSAL(*t, None, 2), (query, key, value))
    assert torch.autograd.gradcheck(BIDIRECTIONAL, (query, key, value))
    cu = ints(0, 1, 4), ints(0, 2, 5)
    packed = query[0], key[0], value[0]
    assert torch.autograd.gradcheck(lambda *t: VARLEN(*t, *cu, None, True), packed)


@pytest.mark.parametrize("op", [CAUSAL, BIDIRECTIONAL], ids=lambda op: op.name)
def test_gradients_under_transforms_run_the_definition(op: ir.IrOp) -> None:
    """torch cannot batch its fused kernels, or differentiate them in forward mode."""
    query, key, value = torch.randn(3, 1, 4, 2, 4, dtype=torch.float64)
    for transform in (torch.func.hessian, torch.func.jacfwd, torch.func.jacrev):
        found, expected = (
            transform(lambda x, call=call: call(x, key, value).square().sum())(query)
            for call in (op, op.native)
        )
        torch.testing.assert_close(found, expected)


def test_gradients_of_a_traced_call_read_no_lengths() -> None:
    arguments, cu = packed(), ints(0, 3, 6)
    call = torch.compile(VARLEN, backend="aot_eager", fullgraph=True)
    expected = gradients(VARLEN, tuple(arguments), cu, cu, None, True)
    found = gradients(call, tuple(arguments), cu, cu, None, True)
    torch.testing.assert_close(found, expected)
    other = ints(0, 2, 7)
    expected = gradients(VARLEN, tuple(arguments), other, other, None, True)
    torch.testing.assert_close(
        gradients(call, tuple(arguments), other, other, None, True), expected
    )


@pytest.mark.parametrize("op", [CAUSAL, BIDIRECTIONAL], ids=lambda op: op.name)
def test_gradients_of_compiled_calls_of_any_length(op: ir.IrOp) -> None:
    call = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 7):
        arguments = tuple(torch.randn(2, tokens, heads, 8) for heads in (4, 2, 2))
        torch.testing.assert_close(gradients(call, arguments), gradients(op.native, arguments))


@pytest.mark.parametrize("op", [CAUSAL, BIDIRECTIONAL], ids=lambda op: op.name)
def test_gradients_of_compiled_calls_of_data_dependent_length(op: ir.IrOp) -> None:
    arguments = tuple(torch.randn(2, 6, heads, 8) for heads in (4, 2, 2))
    seen = torch.tensor([1, 1, 0, 1, 1, 0])

    def call(*tensors: Tensor) -> Any:
        return op(*(t[:, seen.nonzero()[:, 0]] for t in tensors))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = gradients(compiled, arguments)
    torch.testing.assert_close(found, gradients(call, arguments))


# Prompts over the paged cache by gathered keys: the provider ``aten`` of ``paged_attention``.

OP = ir.ops.paged_attention
each_variant = pytest.mark.parametrize("provider", ["aten", "aten[prompt=1]"])
BLOCK = 16


def batch(
    sequences: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (32, 32),
    extra: int = 0,
) -> list[Tensor]:
    """Return tensors for *sequences* (numbers of queries and of keys), and *extra* tokens."""
    counts, lengths = zip(*sequences, strict=True)
    width = max(-(-max(lengths) // BLOCK), 1)
    blocks = len(sequences) * width + 1
    shape = (blocks, heads[1], BLOCK)
    tables = torch.randperm(blocks - 1).view(len(sequences), width) + 1
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [
        torch.randn(starts[-1] + extra, heads[0], sizes[0]).to(dtype),
        torch.randn(*shape, sizes[0]).to(dtype),
        torch.randn(*shape, sizes[1]).to(dtype),
        *(torch.tensor(x, dtype=torch.int32) for x in (tables.tolist(), lengths, starts)),
    ]


def check_prompts(provider: str, arguments: list[Tensor], **options: Any) -> Tensor:
    found: Tensor = OP.using(f"{provider}!")(*arguments, **options)
    expected = OP.native(*arguments, **options)
    tolerance = OP.get_tolerance(found.dtype)._asdict()
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    assert found.is_contiguous()
    return found


MIXED = [(1, 40), (150, 150), (0, 20), (3, 70), (130, 200), (1, 1), (128, 128), (20, 20)]


@each_variant
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"scale": -0.3},
        {"causal": False},
        {"window": 1},
        {"window": 33},
        {"window": 500},
    ],
    ids=str,
)
def test_prompts_decodes_and_chunks_in_one_batch(
    provider: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    check_prompts(provider, batch(MIXED, dtype, extra=5), **options)


@each_variant
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("sizes", [(16, 16), (24, 40), (40, 24)])
def test_heads(provider: str, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    check_prompts(provider, batch([(129, 129), (1, 30), (140, 160)], heads=heads, sizes=sizes))


@each_variant
def test_queries_without_keys_give_zeros(provider: str) -> None:
    found = check_prompts(provider, batch([(130, 100), (140, 0), (200, 200)]))
    assert not found[:30].any()
    assert not found[130:270].any()


@each_variant
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [1, 2])
def test_masked_keys_contribute_nothing(provider: str, which: int, bad: float) -> None:
    arguments = batch([(150, 150), (130, 130)])
    last = arguments[3][0, 149 // BLOCK]
    arguments[which][last, :, 149 % BLOCK] = bad  # the last key, which one query sees
    arguments[which][last, :, 150 % BLOCK :] = math.nan  # beyond the keys
    arguments[which][0] = math.nan  # of no table
    found = check_prompts(provider, arguments)
    assert found[:149].isfinite().all()
    assert found[150:].isfinite().all()


def test_batches_of_decodes_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of decode steps can be recorded with it of any size."""

    def tolist(self: Tensor) -> Any:
        raise AssertionError("waits for the device")

    decodes, few = batch([(1, 40)] * 200), batch([(100, 130), (20, 20)])
    prompts = batch([(130, 150), (200, 200)])
    expected = [OP.native(*arguments) for arguments in (decodes, few)]
    monkeypatch.setattr(Tensor, "tolist", tolist)
    for arguments, wanted in zip((decodes, few), expected, strict=True):
        found = OP.using("aten!")(*arguments)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    with pytest.raises(AssertionError, match="waits"):
        OP.using("aten!")(*prompts)
    ir.note_lengths(*prompts[4:], [150, 200], [0, 130, 330])
    assert OP.using("aten!")(*prompts).isfinite().all()


def test_decodes_are_left_to_a_kernel_that_reads_the_cache() -> None:
    arguments = batch(MIXED)
    with ir.record() as record, ir.priority(paged_attention=["aten"]):
        OP(*arguments)
    [chosen] = [each for each in record.selected_impls["paged_attention"] if each != "aten"]
    assert chosen in ("opweave_c", "native")


@each_variant
def test_invalid_lengths_and_blocks_are_errors(provider: str) -> None:
    for length in (-1, 161):
        arguments = batch([(150, 150), (130, 130)])
        arguments[4][1] = length
        with pytest.raises(IndexError, match=rf"seq_lens\[1\] is {length}; .* room for 0 to 160"):
            OP.using(f"{provider}!")(*arguments)
    for block in (-1, 99):
        arguments = batch([(150, 150), (130, 130)])
        arguments[3][1, 2] = block
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            OP.using(f"{provider}!")(*arguments)


def test_a_soft_cap_is_refused() -> None:
    with pytest.raises(ProviderRejectedError, match="soft_cap"):
        OP.using("aten!")(*batch([(130, 130)]), soft_cap=30.0)
