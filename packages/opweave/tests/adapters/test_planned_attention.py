"""``paged_attention`` of FlashInfer and FlashAttention, with functions that follow their documents.

The implementations are called without their rules, which need a GPU.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from adapters import planned_libraries
from adapters.planned_libraries import Wrapper
from opweave import ir
from opweave.conformance import Case, Subject, verify
from opweave.conformance.inputs import with_accepted_sizes
from opweave.ir import rules
from opweave.ir.testing import restored
from opweave.kernels import arguments
from opweave.kernels.libraries import flash_attn, flashinfer
from opweave.tuning.measure import contest, default_provider
from opweave.tuning.timing import Effort

OP = ir.ops.paged_attention
Sequences = list[tuple[int, int]]  # the numbers of queries and of keys
MIXED = [(1, 40), (30, 30), (3, 70), (13, 20), (1, 1), (16, 48)]
DECODES = [(1, 40), (1, 1), (1, 16), (1, 17), (1, 200)]


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", planned_libraries)
    monkeypatch.setattr(flash_attn, "_decode", lambda: planned_libraries.flash_attn_with_kvcache)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(Wrapper, "plans", 0)
    monkeypatch.setattr(Wrapper, "runs", 0)
    flashinfer._workspace.cache_clear()


def batch(
    sequences: Sequences,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    block_size: int = 16,
    extra: int = 0,
    padding: int = 2,
) -> list[Tensor]:
    """Return tensors whose unused blocks are NaN; *padding* columns of the tables are unused."""
    counts, lengths = zip(*sequences, strict=True)
    width = max(-(-max(lengths) // block_size), 1) + padding
    blocks = len(sequences) * width + 1
    tables = torch.randperm(blocks)[:-1].view(len(sequences), width)
    used = torch.zeros(blocks, block_size, dtype=torch.bool)
    for table, length in zip(tables, lengths, strict=True):
        for position in range(length):
            used[table[position // block_size], position % block_size] = True
    shape = blocks, heads[1], block_size, size
    caches = [torch.randn(shape).masked_fill(~used[:, None, :, None], math.nan) for _ in range(2)]
    for table, length in zip(tables, lengths, strict=True):
        table[-(-length // block_size) :] = 10**6  # never read
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    ints = (torch.tensor(x, dtype=torch.int32) for x in (tables.tolist(), lengths, starts))
    return [torch.randn(starts[-1] + extra, heads[0], size), *caches, *ints]


def note(tensors: list[Tensor], **options: Any) -> ir.HostLengths:
    return ir.note_lengths(*tensors[4:], tensors[4].tolist(), tensors[5].tolist(), **options)


def call(
    provider: Any,
    tensors: list[Tensor],
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    found: Tensor = provider._paged_attention(*tensors, scale, causal, window, soft_cap)
    return found


def check(provider: Any, tensors: list[Tensor], **options: Any) -> Tensor:
    found, expected = call(provider, tensors, **options), OP.native(*tensors, **options)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, equal_nan=True)
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"causal": False},
    {"window": 1},
    {"window": 16},
    {"window": 500},
    {"soft_cap": 2.0},
    {"window": 7, "soft_cap": 5.0, "scale": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (5, 1), (6, 2)], ids=str)
def test_flashinfer_computes_the_op(
    sequences: Sequences, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    tensors = batch(sequences, heads)
    note(tensors)
    check(flashinfer, tensors, **options)
    assert (Wrapper.plans, Wrapper.runs) == (1, 1)


@pytest.mark.parametrize("provider", [flashinfer, flash_attn])
def test_random_batches(provider: Any) -> None:
    choose = random.Random(0)
    for _ in range(60):
        counts = [choose.choice((0, 1, 1, 1, 2, 9)) for _ in range(choose.randrange(1, 5))]
        sequences = [(count, max(0, count + choose.randrange(-3, 40))) for count in counts]
        block_size = 256 if provider is flash_attn else choose.choice((1, 16, 64))
        tensors = batch(sequences, block_size=block_size, extra=choose.choice((0, 3)))
        options = choose.choice(OPTIONS)
        if sum(counts) == 0:
            continue  # wrap() leaves empty batches to native
        note(tensors)
        for _ in range(2):
            check(provider, tensors, **options)


@pytest.mark.parametrize(
    ("sequences", "extra"),
    [([(1, 40), (0, 20)], 0), ([(1, 40), (3, 0)], 0), ([(5, 3), (1, 9)], 0), (MIXED, 4)],
    ids=["no queries", "no keys", "fewer keys than queries", "tokens of no sequence"],
)
def test_flashinfer_gets_only_what_it_documents(sequences: Sequences, extra: int) -> None:
    tensors = batch(sequences, extra=extra)
    note(tensors)
    found = check(flashinfer, tensors)
    assert not Wrapper.plans
    if extra:
        assert not found[-extra:].any()


def test_one_plan_serves_all_layers_of_a_step() -> None:
    tensors = batch(MIXED)
    note(tensors)
    for layer in range(8):
        caches = [cache.roll(layer, 3) for cache in tensors[1:3]]
        query = torch.randn_like(tensors[0])
        check(flashinfer, [query, *caches, *tensors[3:]], window=9 if layer % 2 else None)
    assert (Wrapper.plans, Wrapper.runs) == (2, 8)  # with and without a window
    check(flashinfer, [tensors[0], *tensors[1:3], tensors[3].clone(), *tensors[4:]])
    assert Wrapper.plans == 3  # other tables, as of another group of layers
    note(tensors)
    check(flashinfer, tensors)
    assert Wrapper.plans == 4  # the next step


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=str)
def test_masked_values_contribute_nothing(bad: float, options: dict[str, Any]) -> None:
    tensors = batch([(30, 30), (1, 40)])
    tensors[2][tensors[3][0, 1], :, 13] = bad  # key 29, which the last query sees
    tensors[2][tensors[3][1, 0], :, 0] = 1.0 if not options else bad
    note(tensors)
    found = check(flashinfer, tensors, **options)
    assert found[:29].isfinite().all()


@pytest.mark.parametrize("provider", [flashinfer, flash_attn])
def test_recorded_decodes_follow_their_tensors(provider: Any) -> None:
    block_size = 256 if provider is flash_attn else 16
    tensors = batch([(1, 1)] * 3, block_size=block_size)
    tensors[1:3] = [torch.randn(20, 2, block_size, 16) for _ in range(2)]
    tensors[3] = torch.zeros(3, 5, dtype=torch.int32)
    noted = note(tensors, is_recorded=True)
    check(provider, tensors)
    for lengths in ([5, 1, 70], [80, 16, 17], [1, 1, 2]):
        tensors[0].copy_(torch.randn_like(tensors[0]))
        tensors[3].copy_(torch.randperm(20)[:15].view(3, 5))
        tensors[4].copy_(torch.tensor(lengths))
        noted.update(lengths)
        plans = Wrapper.plans
        check(provider, tensors)
        assert Wrapper.plans == plans  # planned by update()


def test_recorded_decodes_with_a_window_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = batch(DECODES)
    noted = note(tensors, is_recorded=True)
    check(flashinfer, tensors, window=9)
    noted.update(noted.lengths)
    assert not Wrapper.plans


def test_flash_attn_computes_decodes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    kernel = planned_libraries.flash_attn_with_kvcache

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(flash_attn, "_decode", lambda: counted)
    for sequences, count in ((DECODES, 1), ([(1, 0), (1, 300)], 1), (MIXED, 0), ([(2, 3)], 0)):
        for options in ({}, {"scale": 0.2}, {"soft_cap": 3.0}, {"causal": False}):
            calls.clear()
            tensors = batch(sequences, block_size=256)
            note(tensors)
            check(flash_attn, tensors, **options)
            assert len(calls) == count
    tensors = batch(DECODES, block_size=256, extra=2)
    note(tensors)
    calls.clear()
    check(flash_attn, tensors)
    assert not calls


@pytest.mark.parametrize("length", [-1, 10**4])
def test_invalid_lengths(length: int) -> None:
    tensors = batch(DECODES)
    ir.note_lengths(*tensors[4:], [1, 1, length, 1, 1], tensors[5].tolist())
    with pytest.raises(IndexError, match=rf"seq_lens\[2\] is {length}; block_tables has room"):
        call(flashinfer, tensors)


@pytest.mark.parametrize("block", [-1, 10**6])
def test_invalid_blocks(block: int) -> None:
    tensors = batch(DECODES)
    tensors[3][0, 1] = block
    note(tensors)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        call(flashinfer, tensors)


# Latent attention.

LATENT = ir.ops.mla_attention_decode


def latent_batch(
    lengths: list[int], sizes: tuple[int, int] = (512, 64), heads: int = 3, block_size: int = 16
) -> list[Tensor]:
    """Return tensors of decodes, with NaN in unused rows."""
    latent, rope = sizes
    query, cache, _, *rest = batch([(1, n) for n in lengths], (1, 1), latent + rope, block_size)
    query = torch.randn(len(query), heads, 8 + rope)
    weight = torch.randn(heads * (8 + 5), latent) / latent**0.5
    return [query, cache[:, 0], weight, *rest]


def check_latent(tensors: list[Tensor], scale: float | None = None) -> Tensor:
    found = flashinfer._mla_attention_decode(*tensors, scale)
    expected = LATENT.native(*tensors, scale)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, equal_nan=True)
    assert found.is_contiguous()
    return found


@pytest.mark.parametrize("scale", [None, 0.07])
@pytest.mark.parametrize("sizes", [(512, 64), (256, 64)], ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_flashinfer_computes_latent_attention(
    sizes: tuple[int, int], block_size: int, scale: float | None
) -> None:
    tensors = latent_batch([40, 1, 16, 17, 200], sizes, block_size=block_size)
    note(tensors)
    for _ in range(3):  # layers
        tensors[0] = torch.randn_like(tensors[0])
        tensors[1] = tensors[1].roll(7, 2)
        check_latent(tensors, scale)
    assert (Wrapper.plans, Wrapper.runs) == (1, 3)


def test_recorded_latent_attention_follows_its_tensors() -> None:
    tensors = latent_batch([1] * 3)
    tensors[1] = torch.randn(20, 16, 576)
    tensors[3] = torch.zeros(3, 5, dtype=torch.int32)
    noted = note(tensors, is_recorded=True)
    check_latent(tensors)
    for lengths in ([5, 1, 70], [80, 16, 17], [1, 1, 2]):
        tensors[3].copy_(torch.randperm(20)[:15].view(3, 5))
        tensors[4].copy_(torch.tensor(lengths))
        noted.update(lengths)
        plans = Wrapper.plans
        check_latent(tensors)
        assert Wrapper.plans == plans  # planned by update()


@pytest.mark.parametrize(
    ("counts", "lengths", "extra"),
    [([1, 2], [9, 9], 0), ([1, 0], [9, 9], 0), ([1, 1], [9, 0], 0), ([1, 1], [9, 9], 2)],
    ids=["two queries", "no queries", "no keys", "tokens of no sequence"],
)
def test_latent_attention_of_other_batches(
    counts: list[int], lengths: list[int], extra: int
) -> None:
    tensors = latent_batch(lengths)
    tensors[0] = torch.randn(sum(counts) + extra, 3, 72)
    tensors[5] = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    note(tensors)
    check_latent(tensors)
    assert not Wrapper.plans


def test_invalid_latent_attention() -> None:
    tensors = latent_batch([9, 9])
    note(tensors)
    narrow = [tensors[0][..., :60], *tensors[1:]]
    with pytest.raises(ValueError, match="query must be"):
        flashinfer._mla_attention_decode(*narrow, None)
    tensors[3][0, 0] = 10**6
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        flashinfer._mla_attention_decode(*tensors, None)


# The rule, for tensors on a GPU without memory.


@contextmanager
def on_gpu_of(op: ir.IrOp, tensors: list[Tensor], *options: Any) -> Iterator[dict[str, Any]]:
    """Give arguments of *op* by name, with decodes of noted lengths."""
    narrow = {torch.float32: torch.bfloat16}
    shapes = [(t.shape, narrow.get(t.dtype, t.dtype)) for t in tensors]
    arguments._capability.cache_clear()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        moved = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
        count = len(moved[4])
        ir.note_lengths(*moved[4:], [9] * count, range(count + 1))
        yield dict(zip(op.schema.names, [*moved, *options], strict=True))
    arguments._capability.cache_clear()


@pytest.fixture
def on_gpu() -> Iterator[dict[str, Any]]:
    with on_gpu_of(OP, batch(DECODES, size=64), None, True, None, None) as values:
        yield values


def reason(values: dict[str, Any]) -> str | None:
    return why(arguments.PLANNED, OP, values)


def why(rule: Any, op: ir.IrOp, values: dict[str, Any]) -> str | None:
    return None if rules.holds(rule, op.schema, values) else rule.reason(op.schema, values)


def test_the_rule_of_latent_attention() -> None:
    for sizes in flashinfer.LATENT_SIZES:
        with on_gpu_of(LATENT, latent_batch([9, 9], sizes), None) as values:
            rule = flashinfer._LATENT
            assert why(rule, LATENT, values) is None
            float32 = {**values, "query": values["query"].float()}
            assert "query: float32" in str(why(rule, LATENT, float32))
            other = {**values, "kv_cache": values["kv_cache"].half()}
            assert "kv_cache: float16" in str(why(rule, LATENT, other))
            assert "scale" in str(why(rule, LATENT, {**values, "scale": 0.0}))
            strided = {**values, "kv_cache": values["kv_cache"].transpose(0, 1)}
            assert "contiguous" in str(why(rule, LATENT, strided))
            unknown = {**values, "seq_lens": values["seq_lens"].clone()}
            assert why(rule, LATENT, unknown) == "the lengths are not known on the host"
    for sizes in ((512, 32), (384, 64), (128, 64)):
        with on_gpu_of(LATENT, latent_batch([9, 9], sizes), None) as values:
            found = why(flashinfer._LATENT, LATENT, values)
            assert found == "(latent, rope) is not one of ((512, 64), (256, 64))"


def test_tools_make_sizes_that_the_rule_accepts() -> None:
    """``make gpu`` and ``opweave verify`` change one option of the generator at a time."""
    latents = rules.custom(flashinfer._has_latent_sizes, "other sizes")
    with restored(LATENT):
        LATENT.register_impl("sized", supports_args=latents)(LATENT.native)
        subject = with_accepted_sizes(Subject(LATENT, "sized"))
        assert subject is not None
        assert dict(subject.options) == {"latent_size": 512}


def test_lengths_must_be_known(on_gpu: dict[str, Any]) -> None:
    assert reason(on_gpu) is None
    unknown = {**on_gpu, "seq_lens": on_gpu["seq_lens"].clone()}
    assert reason(unknown) == "the lengths are not known on the host"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": 0.0}, "scale is not positive"),
        ({"window": 0}, "window or soft_cap is not positive"),
        ({"soft_cap": -1.0}, "window or soft_cap is not positive"),
    ],
)
def test_options_that_the_libraries_lack(
    on_gpu: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    found = reason({**on_gpu, **changes})
    assert found is not None
    assert words in found


# Notes of lengths.


def test_a_note_belongs_to_two_tensors() -> None:
    first, second = batch(DECODES), batch(DECODES)
    noted = note(first)
    assert ir.host_lengths(*first[4:]) is noted
    assert (noted.lengths, noted.starts) == ([40, 1, 16, 17, 200], [0, 1, 2, 3, 4, 5])
    assert ir.host_lengths(first[4], second[5]) is None
    assert ir.host_lengths(second[4], first[5]) is None
    assert ir.host_lengths(first[4].clone(), first[5]) is None


def test_a_note_ends_with_its_tensor() -> None:
    tensors = batch(DECODES)
    note(tensors)
    call(flashinfer, tensors)
    [plan] = noted.plans.values() if (noted := ir.host_lengths(*tensors[4:])) else []
    alive = [weakref.ref(each) for each in (noted, plan, plan.wrapper)]
    del tensors, noted, plan
    gc.disable()
    try:
        assert [each() for each in alive] == [None] * 3
    finally:
        gc.enable()


CHECKED = ("keywords", "inference_mode", "global_state", "staleness", "empty")


def test_tools_note_the_lengths() -> None:
    """Verification and tuning run a provider that needs them."""
    calls: list[ir.HostLengths] = []

    @functools.wraps(OP.native)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        values = OP.bind(*args, **kwargs)
        noted = ir.host_lengths(*values[4:6])
        assert noted is not None
        calls.append(noted)
        lengths = torch.tensor(noted.lengths, dtype=torch.int32)
        starts = torch.tensor(noted.starts, dtype=torch.int32)
        found: Tensor = OP.native(*values[:4], lengths, starts, *values[6:])
        return found

    with restored(OP):
        OP.register_impl("planner", supports_args=arguments.HAS_HOST_LENGTHS)(attend)
        subject = Subject(OP, "planner")
        for outcome in verify(subject, CHECKED).outcomes:
            assert outcome.status == "passed", outcome
        values = OP.bind(*OP.generate_inputs())
        case = Case(OP, "usual", values)
        assert default_provider(case) != "planner"
        [measured] = contest(case, ["planner"], Effort(rounds=1))
        assert measured.status == "passed", measured.reason
    assert calls
