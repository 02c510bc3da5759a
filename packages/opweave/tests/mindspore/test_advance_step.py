"""advance_step_flashattn in MindSpore against a loop over the sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mindspore
from mindspore import Tensor
from opweave_mindspore import _custom_ops

Array = NDArray[Any]


@dataclass(frozen=True)
class Step:
    """The arguments of one call."""

    block_size: int
    input_tokens: Array
    sampled_token_ids: Array
    input_positions: Array
    seq_lens: Array
    slot_mapping: Array
    block_tables: Array

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.seq_lens), len(self.sampled_token_ids), self.block_size

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (
            self.input_tokens,
            self.sampled_token_ids,
            self.input_positions,
            self.seq_lens,
            self.slot_mapping,
            self.block_tables,
        )


def loop(step: Step) -> tuple[Array, ...]:
    """Return the expected contents of the six tensors, computed sequence by sequence."""
    tokens, sampled, positions, lengths, slots, tables = (a.copy() for a in step.arrays)
    for i in range(len(lengths)):
        if i < len(sampled):
            position = int(lengths[i])
            block, offset = divmod(position, step.block_size)
            tokens[i], positions[i], lengths[i] = sampled.reshape(-1)[i], position, position + 1
            slots[i] = int(tables[i, block]) * step.block_size + offset
        else:
            tokens[i], positions[i], slots[i] = 0, 0, -1
    return tokens, sampled, positions, lengths, slots, tables


def random_step(rng: np.random.Generator) -> Step:
    num_seqs, width = int(rng.choice([1, 2, 3, 8, 33])), int(rng.choice([1, 2, 5]))
    num_queries = num_seqs if rng.integers(2) else int(rng.integers(1, num_seqs + 1))
    block_size = int(rng.choice([1, 3, 8, 16, 32, 48]))
    lengths = rng.integers(width * block_size, size=num_seqs).astype(str(rng.choice(["i4", "i8"])))
    lengths[num_queries:] = rng.choice([-7, 0, 2**31 - 1])  # no length at all: it is padding
    sampled = rng.integers(2**40, size=(num_queries, 1))
    return Step(
        block_size=block_size,
        input_tokens=rng.integers(100, size=num_seqs),
        sampled_token_ids=sampled if rng.integers(2) else sampled[:, 0],
        input_positions=rng.integers(100, size=num_seqs),
        seq_lens=lengths,
        slot_mapping=rng.integers(100, size=num_seqs),
        block_tables=rng.integers(2**31 - 1, size=(num_seqs, width)).astype(
            str(rng.choice(["i4", "i8"]))
        ),
    )


def run(step: Step) -> list[Tensor]:
    tensors = [Tensor(a.copy()) for a in step.arrays]
    _custom_ops.advance_step_flashattn(*step.counts, *tensors)
    return tensors


def assert_holds(tensors: list[Tensor], wanted: tuple[Array, ...]) -> None:
    for found, array in zip(tensors, wanted, strict=True):
        values = found.asnumpy()
        assert values.dtype == array.dtype
        np.testing.assert_array_equal(values, array)


def test_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(300):
        step = random_step(rng)
        assert_holds(run(step), loop(step))


@pytest.mark.parametrize("num_seqs", [0, 4])
def test_no_query(num_seqs: int) -> None:
    zeros = np.zeros(num_seqs, "i8")
    step = Step(8, zeros + 1, zeros[:0], zeros + 2, zeros + 3, zeros, np.zeros((num_seqs, 2), "i4"))
    if num_seqs:
        assert_holds(run(step), loop(step))
    else:  # MindSpore itself reads no empty tensor back
        run(step)


def test_rows_of_a_wider_table(seed: int) -> None:
    step = random_step(np.random.default_rng(seed))
    wide = Tensor(np.pad(step.block_tables, ((0, 0), (2, 3)), constant_values=-1))
    tables = wide[:, 2 : 2 + step.block_tables.shape[1]]
    tensors = [Tensor(a.copy()) for a in step.arrays[:-1]]
    tensors.append(tables)
    _custom_ops.advance_step_flashattn(*step.counts, *tensors)
    assert_holds(tensors, loop(step))


def test_between_other_operators(seed: int) -> None:
    """Operators before the call have not run yet when it is made, and others follow it at once."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        step = random_step(rng)
        tensors = [Tensor(a) + 1 - 1 for a in step.arrays]
        _custom_ops.advance_step_flashattn(*step.counts, *tensors)
        following = [t * 1 for t in tensors]
        wanted = loop(step)
        assert_holds(following, wanted)
        assert_holds(tensors, wanted)


def small_step(**changes: Any) -> Step:
    """Three sequences, one of them padding, in blocks of 4; *changes* break it."""
    step = Step(
        block_size=4,
        input_tokens=np.array([1, 2, 3]),
        sampled_token_ids=np.array([[7], [8]]),
        input_positions=np.array([4, 5, 6]),
        seq_lens=np.array([3, 4, 9], "i4"),
        slot_mapping=np.array([7, 8, 9]),
        block_tables=np.array([[5, 6], [2, 9], [0, 0]], "i4"),
    )
    return replace(step, **changes)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seq_lens": np.array([3, 8, 0], "i4")}, "sequence 1: position 8 needs block 2 of its table"),
    ({"seq_lens": np.array([-2, 8, 0])}, "sequence 0: its length is -2, and it is negative"),
    ({"block_tables": np.array([[5, 6], [2, -1], [0, 0]])}, r"block_tables\[1, 1\] is -1"),
    ({"block_size": 0}, "block_size must be positive, found 0"),
    ({"input_tokens": np.zeros(2, "i8")}, r"input_tokens must have shape \[3\]"),
    ({"input_positions": np.zeros(3, "f4")}, "input_positions must be int64, found float32"),
    ({"seq_lens": np.zeros(3, "i2")}, "seq_lens must be int32 or int64, found int16"),
    ({"sampled_token_ids": np.zeros((2, 2), "i8")}, "sampled_token_ids must have shape"),
    ({"block_tables": np.zeros((2, 2), "i4")}, r"block_tables must have shape \[3, blocks\]"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals_change_nothing(case: int) -> None:
    changes, message = REFUSED[case]
    step = small_step(**changes)
    tensors = run(step)
    with pytest.raises(RuntimeError, match=f"advance_step_flashattn: .*{message}"):
        tensors[0].asnumpy()
    assert_holds(tensors, step.arrays)


def test_outputs_share_no_memory() -> None:
    step = small_step()
    tensors = [Tensor(a) for a in step.arrays]
    tensors[4] = tensors[0]
    _custom_ops.advance_step_flashattn(*step.counts, *tensors)
    with pytest.raises(RuntimeError, match="must not share memory"):
        tensors[0].asnumpy()
    assert_holds(tensors[:4], step.arrays[:4])


def test_a_slice_is_written_where_it_lies() -> None:
    step = small_step()
    long = Tensor(np.full(6, -5))
    tensors = [Tensor(a) for a in step.arrays]
    tensors[4] = long[2:5]
    _custom_ops.advance_step_flashattn(*step.counts, *tensors)
    assert long.asnumpy().tolist() == [-5, -5, 23, 36, -1, -5]


def test_a_written_tensor_must_be_contiguous() -> None:
    step = small_step()
    wide = Tensor(np.zeros((3, 2), "i8"))
    tensors = [Tensor(a) for a in step.arrays]
    tensors[4] = wide[:, 0]
    _custom_ops.advance_step_flashattn(*step.counts, *tensors)
    with pytest.raises(RuntimeError, match="slot_mapping must be contiguous"):
        wide.asnumpy()
    assert not wide.asnumpy().any()


def test_wrong_types() -> None:
    with pytest.raises(TypeError):
        _custom_ops.advance_step_flashattn(3, 2, 4, *small_step().arrays)


def test_the_mode_that_was_tested() -> None:
    assert mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
