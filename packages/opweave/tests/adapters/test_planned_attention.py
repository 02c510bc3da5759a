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
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from adapters import planned_libraries
from adapters.planned_libraries import Wrapper
from opweave import ir
from opweave.conformance import Case, Subject, verify
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


# The rule, for tensors on a GPU without memory.


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return arguments of the op by name, with decodes of noted lengths."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    arguments._capability.cache_clear()
    shapes = [(t.shape, t.dtype) for t in batch(DECODES, size=64)]
    with FakeTensorMode():
        narrow = {torch.float32: torch.bfloat16}
        tensors = [
            torch.empty(shape, dtype=narrow.get(dtype, dtype), device="cuda")
            for shape, dtype in shapes
        ]
        ir.note_lengths(*tensors[4:], [9] * 5, range(6))
        yield dict(zip(OP.schema.names, [*tensors, None, True, None, None], strict=True))
    arguments._capability.cache_clear()


def reason(values: dict[str, Any]) -> str | None:
    rule = arguments.PLANNED
    return None if rules.holds(rule, OP.schema, values) else rule.reason(OP.schema, values)


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
