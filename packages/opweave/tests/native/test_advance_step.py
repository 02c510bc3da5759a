"""advance_step_flashattn: every way to call it against a loop over the sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import _custom_ops, ir
from opweave.ir.ops.kv_cache import advance_step_flashattn as op
from opweave.kernels.opweave_c import paged_attention as provider
from opweave.native import module as native_module

from .oracle import CALL_PATHS, call_path

INDICES = (torch.int32, torch.int64)
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Step:
    """The arguments of one call."""

    block_size: int
    input_tokens: Tensor
    sampled_token_ids: Tensor
    input_positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_tables: Tensor

    @property
    def outputs(self) -> Outputs:
        return self.input_tokens, self.input_positions, self.seq_lens, self.slot_mapping

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.seq_lens), len(self.sampled_token_ids), self.block_size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the op and of the seed's function."""
        return (
            self.input_tokens,
            self.sampled_token_ids,
            self.input_positions,
            self.seq_lens,
            self.slot_mapping,
            self.block_tables,
        )

    def copy(self) -> Step:
        """The same values in the same layout, in memory of their own where they are written."""
        tokens, positions, lengths, slots = (t.clone() for t in self.outputs)
        return replace(
            self,
            input_tokens=tokens,
            input_positions=positions,
            seq_lens=lengths,
            slot_mapping=slots,
        )


def loop(step: Step) -> Outputs:
    """The definition, one sequence after the other."""
    tokens, positions, lengths, slots = (t.tolist() for t in step.outputs)
    sampled = step.sampled_token_ids.reshape(-1).tolist()
    for i in range(len(lengths)):
        if i < len(sampled):
            position = lengths[i]
            block, offset = divmod(position, step.block_size)
            tokens[i], positions[i], lengths[i] = sampled[i], position, position + 1
            slots[i] = int(step.block_tables[i, block]) * step.block_size + offset
        else:
            tokens[i], positions[i], slots[i] = 0, 0, -1
    values = (tokens, positions, lengths, slots)
    a, b, c, d = (torch.tensor(v, dtype=t.dtype) for v, t in zip(values, step.outputs, strict=True))
    return a, b, c, d


def pick(*values: Any) -> Any:
    return values[int(torch.randint(len(values), ()))]


def random_step() -> Step:
    num_seqs, width = pick(0, 1, 2, 3, 8, 33), pick(1, 2, 5)
    num_queries = pick(num_seqs, int(torch.randint(num_seqs + 1, ())))
    block_size = pick(1, 3, 8, 16, 32, 48)
    table_dtype = pick(*INDICES)
    largest = pick(10, 2**31 - 1, 2**50 if table_dtype is torch.int64 else 2**31 - 1)
    sampled = torch.randint(2**40, (num_queries, pick(1, 3)))[:, :1]  # a column, maybe strided
    tables = torch.randint(largest, (num_seqs, width + pick(0, 4))).to(table_dtype)
    lengths = torch.randint(width * block_size, (num_seqs,)).to(pick(*INDICES))
    # The length of a padded row is not checked, even if it is invalid.
    lengths[num_queries:] = pick(-7, 0, 2**31 - 1)
    return Step(
        block_size=block_size,
        input_tokens=torch.randint(100, (num_seqs,)),
        sampled_token_ids=pick(sampled, sampled[:, 0]),
        input_positions=torch.randint(100, (num_seqs,)),
        seq_lens=lengths,
        slot_mapping=torch.randint(100, (num_seqs,)),
        block_tables=tables[:, :width],
    )


def small_step(**changes: Any) -> Step:
    """Three sequences, one of them padding, in blocks of 4; *changes* break it."""
    step = Step(
        block_size=4,
        input_tokens=torch.tensor([1, 2, 3]),
        sampled_token_ids=torch.tensor([[7], [8]]),
        input_positions=torch.tensor([4, 5, 6]),
        seq_lens=torch.tensor([3, 4, 9], dtype=torch.int32),
        slot_mapping=torch.tensor([7, 8, 9]),
        block_tables=torch.tensor([[5, 6], [2, 9], [0, 0]], dtype=torch.int32),
    )
    return replace(step, **changes)


def through_native(step: Step) -> Outputs:
    outputs: Outputs = op.native(*step.tensors, step.block_size)
    return outputs


def through_provider(step: Step) -> Outputs:
    outputs: Outputs = op.using("opweave_c!")(*step.tensors, step.block_size)
    return outputs


def through_donation(step: Step) -> Outputs:
    with ir.priority(advance_step_flashattn=["opweave_c!"]):
        outputs: Outputs = op.maybe_inplace(*step.tensors, step.block_size)
    assert all(a is b for a, b in zip(outputs, step.outputs, strict=True))
    return outputs


def through_wrapper(step: Step) -> Outputs:
    _custom_ops.advance_step_flashattn(*step.counts, *step.tensors)
    return step.outputs


def through_path(name: str) -> Callable[[Step], Outputs]:
    def run(step: Step) -> Outputs:
        module = native_module()
        assert module is not None
        call_path(module, name, "advance_step_flashattn")(*step.counts, *step.tensors)
        return step.outputs

    return run


FUNCTIONAL = {"native": through_native, "op": through_provider}
IN_PLACE = {
    "maybe_inplace": through_donation,
    "wrapper": through_wrapper,
    **{name: through_path(name) for name in CALL_PATHS},
}
PATHS = {**FUNCTIONAL, **IN_PLACE}


def assert_same(found: Outputs, wanted: Outputs) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("path", PATHS)
def test_values(module: ModuleType, path: str, count: int) -> None:
    for _ in range(count):
        step = random_step()
        before = step.copy()
        wanted = loop(step)
        assert_same(PATHS[path](step), wanted)
        if path in FUNCTIONAL:
            assert_same(step.outputs, before.outputs)


ADVICE = "blocks of 4 positions; allocate the block before the step"
VALUES: list[tuple[dict[str, Any], str]] = [
    (
        {"seq_lens": torch.tensor([3, 8, 0], dtype=torch.int32)},
        f"sequence 1: position 8 needs block 2 of its table, which has 2 {ADVICE}",
    ),
    ({"seq_lens": torch.tensor([-2, 8, 0])}, "sequence 0: its length is -2, and it is negative"),
    (
        {"seq_lens": torch.tensor([0, 2**31 - 1, 0], dtype=torch.int32), "block_size": 2**40},
        "sequence 1: its length is 2147483647, and seq_lens cannot count further; use int64",
    ),
    (
        {"block_tables": torch.tensor([[5, 6], [2, -1], [0, 0]])},
        "sequence 1: block_tables[1, 1] is -1, which is not a valid block for position 4",
    ),
    (
        {"block_tables": torch.tensor([[2**62, 6], [2, 1], [0, 0]])},
        f"sequence 0: block_tables[0, 0] is {2**62}, which is not a valid block for position 3",
    ),
    (
        {"block_tables": torch.zeros(3, 0, dtype=torch.int32)},
        f"sequence 0: position 3 needs block 0 of its table, which has 0 {ADVICE}",
    ),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("changes", "expected"), VALUES, ids=[e[:40] for _, e in VALUES])
def test_a_sequence_that_cannot_advance(
    module: ModuleType, path: str, changes: dict[str, Any], expected: str
) -> None:
    step = small_step(**changes)
    before = step.copy()
    with pytest.raises((ValueError, RuntimeError)) as error:
        PATHS[path](step)
    assert str(error.value) == f"advance_step_flashattn: {expected}"
    assert_same(step.outputs, before.outputs)
    assert isinstance(error.value, RuntimeError if path in ("wrapper", *CALL_PATHS) else ValueError)


@pytest.mark.parametrize("path", PATHS)
def test_the_first_bad_sequence_is_named(module: ModuleType, path: str) -> None:
    for _ in range(30):
        step = random_step()
        queries = len(step.sampled_token_ids)
        bad = sorted({int(i) for i in torch.randint(queries, (3,))}) if queries else []
        for i in bad:
            step.seq_lens[i] = pick(-1, step.block_tables.shape[1] * step.block_size)
        before = step.copy()
        if not bad:
            continue
        with pytest.raises((ValueError, RuntimeError), match=f"sequence {bad[0]}: "):
            PATHS[path](step)
        assert_same(step.outputs, before.outputs)


LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 0}, "block_size"),
    ({"block_size": -4}, "block_size"),
    ({"input_tokens": torch.zeros(2, dtype=torch.int64)}, "input_tokens"),
    ({"input_tokens": torch.zeros(3, dtype=torch.int32)}, "input_tokens"),
    ({"input_positions": torch.zeros(3)}, "input_positions"),
    ({"slot_mapping": torch.zeros(3, 1, dtype=torch.int64)}, "slot_mapping"),
    ({"seq_lens": torch.zeros(3, dtype=torch.int16)}, "seq_lens"),
    ({"sampled_token_ids": torch.zeros(2, dtype=torch.int32)}, "sampled_token_ids"),
    ({"sampled_token_ids": torch.zeros(2, 2, dtype=torch.int64)}, "sampled_token_ids"),
    ({"sampled_token_ids": torch.zeros(2, 1, 1, dtype=torch.int64)}, "sampled_token_ids"),
    ({"block_tables": torch.zeros(3, dtype=torch.int32)}, "block_tables"),
    ({"block_tables": torch.zeros(2, 2, dtype=torch.int32)}, "block_tables"),
    ({"block_tables": torch.zeros(3, 2)}, "block_tables"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", range(len(LAYOUTS)))
def test_arguments_that_do_not_fit(module: ModuleType, path: str, case: int) -> None:
    changes, culprit = LAYOUTS[case]
    step = small_step(**changes)
    before = step.copy()
    with pytest.raises((ValueError, RuntimeError), match=culprit):
        PATHS[path](step)
    assert_same(step.outputs, before.outputs)


@pytest.mark.parametrize("name", CALL_PATHS)
def test_counts_that_do_not_fit(module: ModuleType, name: str) -> None:
    run = call_path(module, name, "advance_step_flashattn")
    for num_seqs, num_queries, culprit in [
        (3, 4, "num_queries must be between 0 and num_seqs, 3, found 4"),
        (3, -1, "num_queries must be between 0 and num_seqs, 3, found -1"),
        (-1, -1, "num_queries must be between 0 and num_seqs, -1, found -1"),
        (3, 1, r"sampled_token_ids must have shape \[1\] or \[1, 1\]"),
        (4, 2, r"input_tokens must have shape \[4\]"),
    ]:
        step = small_step()
        with pytest.raises(RuntimeError, match=culprit):
            run(num_seqs, num_queries, 4, *step.tensors)
        assert_same(step.outputs, small_step().outputs)


def shared_memory() -> list[tuple[str, Step]]:
    tokens = torch.zeros(3, dtype=torch.int64)
    wide = torch.zeros(5, dtype=torch.int64)
    longs = torch.zeros(3, 2, dtype=torch.int64)
    return [
        ("input_positions", small_step(input_tokens=tokens, input_positions=tokens)),
        ("slot_mapping", small_step(slot_mapping=wide[2:], input_tokens=wide[:3])),
        ("input_tokens", small_step(input_tokens=wide[:3], sampled_token_ids=wide[1:3])),
        ("block_tables", small_step(block_tables=longs, slot_mapping=longs.view(-1)[:3])),
        ("slot_mapping", small_step(slot_mapping=wide[:1].expand(3))),
        ("input_tokens", small_step(input_tokens=torch.zeros(6, dtype=torch.int64)[::2])),
    ]


@pytest.mark.parametrize("name", CALL_PATHS)
@pytest.mark.parametrize("case", range(6))
def test_outputs_share_no_memory(module: ModuleType, name: str, case: int) -> None:
    culprit, step = shared_memory()[case]
    before = step.copy()
    with pytest.raises(RuntimeError, match=culprit):
        call_path(module, name, "advance_step_flashattn")(*step.counts, *step.tensors)
    assert_same(step.outputs, before.outputs)


@pytest.mark.parametrize("case", range(6))
def test_native_takes_shared_memory(module: ModuleType, case: int) -> None:
    _, step = shared_memory()[case]
    with ir.priority(advance_step_flashattn=["opweave_c"]):
        assert_same(op(*step.tensors, step.block_size), loop(step))


def test_opcheck(module: ModuleType) -> None:
    step = small_step()
    arguments = (*step.counts, *step.tensors)
    torch.library.opcheck(torch.ops.opweave_c.advance_step_flashattn.default, arguments)


def in_place(*tensors: Tensor) -> tuple[Tensor, ...]:
    updated = [t + 0 for t in tensors]
    counts = len(updated[3]), len(updated[1]), 4
    _custom_ops.advance_step_flashattn(*counts, *updated)
    return updated[0], updated[2], updated[3], updated[4]


def implementation(*tensors: Tensor) -> Outputs:
    outputs: Outputs = provider.advance_step_flashattn(*(t + 0 for t in tensors), 4)
    return outputs


def native(*tensors: Tensor) -> Outputs:
    outputs: Outputs = op.native(*tensors, 4)
    return outputs


def whole_op(*tensors: Tensor) -> Outputs:
    outputs: Outputs = op(*tensors, 4)
    return outputs


@pytest.mark.parametrize("run", [native, whole_op, implementation, in_place])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(module: ModuleType, run: Callable[..., Any], dynamic: bool) -> None:
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    step = small_step()
    for more in (0, 2, 4):
        tensors = [torch.cat([*[t[:1]] * more, t]) for t in step.tensors]
        assert_same(compiled(*tensors), loop(Step(4, *tensors)))


def test_values_are_not_checked_under_tracers(module: ModuleType) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    step = small_step()
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(op.native, tracing_mode=mode)(*step.tensors, 4)
        assert "_local_scalar_dense" not in graph.code
        assert_same(graph(*step.tensors, 4), loop(step))
