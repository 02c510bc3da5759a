"""Finds the token dimension of each tensor, and selects tokens.

Compares inputs for two numbers of tokens. If tokens interact, as in attention, a row is a sequence,
and a function from the table selects sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.case import Case, Outputs
from opweave.conformance.memory import Values
from opweave.conformance.subject import Subject

_COUNTS = (13, 29)  # unlikely to equal another size
_SEQUENCE_COUNT = 7

Axis = int | None


@dataclass(frozen=True)
class Tokens:
    """The token or sequence dimension of each argument and output.

    Attributes:
        are_rows: whether the dimension counts tokens.
    """

    count: int
    case: Case
    inputs: tuple[Axis, ...]
    outputs: tuple[Axis, ...]
    are_rows: bool = True

    def some(self, which: Sequence[int]) -> Values:
        """Return the arguments for the given tokens, in this order."""
        pairs = zip(self.case.values, self.inputs, strict=True)
        return tuple(taken(value, axis, which) for value, axis in pairs)

    def of(self, outputs: Outputs, which: Sequence[int]) -> Outputs:
        """Return the part of *outputs* for the given tokens."""
        pairs = zip(outputs, self.outputs, strict=True)
        return tuple(taken(t, axis, which) for t, axis in pairs if axis is not None)

    def of_some(self, outputs: Outputs, which: Sequence[int]) -> Outputs:
        """Return the same part of what :meth:`some` leads to."""
        return self.of(outputs, range(len(which)))


def taken(value: Any, axis: Axis, which: Sequence[int]) -> Any:
    """Return the slices *which* of a tensor along *axis*, if there is either."""
    if axis is None or value is None:
        return value
    return value.index_select(axis, torch.tensor(which, dtype=torch.int64, device=value.device))


def tokens_of(subject: Subject, count: int | None = None, **options: Any) -> Tokens | Packed | None:
    """Find out which dimensions count tokens; None where no argument or no output has one.

    Args:
        subject: whose input generator to ask.
        count: the number of tokens of the arguments that are returned.
        options: of the input generator.
    """
    if "num_seqs" in inputs.options_of(subject):
        options = {"num_seqs": _SEQUENCE_COUNT, **options}
    counts = _COUNTS if count is None else (*_COUNTS, count)
    cases = [inputs.generated(subject, num_tokens=n, **options) for n in counts]
    if any(case is None or case.refusal for case in cases):
        return None
    first, second, *_ = made = [case for case in cases if case is not None]
    asked = made[-1]
    if subject.op.name in _SEQUENCES:
        return _SEQUENCES[subject.op.name](asked)
    arguments = tuple(map(_axis, first.values, second.values))
    outputs = tuple(map(_axis, first.native, second.native))
    if all(axis is None for axis in arguments) or all(axis is None for axis in outputs):
        return None
    return Tokens(counts[-1], asked, arguments, outputs)


def _axis(a: Any, b: Any) -> Axis:
    if not isinstance(a, Tensor) or a.ndim != b.ndim:
        return None
    pairs = enumerate(zip(a.shape, b.shape, strict=True))
    return next((i for i, sizes in pairs if sizes == _COUNTS), None)


def _batch(*names: str) -> Callable[[Case], Tokens]:
    """Return what finds sequences along the first dimension of these arguments."""

    def find(case: Case) -> Tokens:
        pairs = list(zip(case.op.schema.names, case.values, strict=True))
        more = [torch.cat([v, v.flip(1), -v]) if name in names else v for name, v in pairs]
        arguments = tuple(0 if name in names else None for name, _ in pairs)
        count = next(v.shape[0] for v, axis in zip(more, arguments, strict=True) if axis == 0)
        batch = case.with_values("more sequences", more)
        return Tokens(count, batch, arguments, tuple(0 for _ in batch.native), are_rows=False)

    return find


@dataclass(frozen=True)
class Packed:
    """Sequences of different lengths, one after the other.

    Attributes:
        packed: the arguments with a row for each token, and the one with their boundaries.
        listed: the arguments with a row for each sequence.
    """

    case: Case
    packed: dict[str, str]
    listed: tuple[str, ...] = ()

    @property
    def _named(self) -> dict[str, Any]:
        return dict(zip(self.case.op.schema.names, self.case.values, strict=True))

    @property
    def count(self) -> int:
        return len(self._named[next(iter(self.packed.values()))]) - 1

    def some(self, which: Sequence[int]) -> Values:
        """Return the arguments for some of the sequences, in this order."""
        named = self._named
        made = dict(named)
        for name, bounds in self.packed.items():
            made[name] = taken(named[name], 0, _rows(named[bounds], which))
        for bounds in set(self.packed.values()):
            lengths = taken(named[bounds].diff(), 0, which)
            made[bounds] = torch.cat((named[bounds][:1], lengths.cumsum(0))).to(named[bounds].dtype)
        for name in self.listed:
            made[name] = taken(named[name], 0, which)
        return tuple(made.values())

    def of(self, outputs: Outputs, which: Sequence[int]) -> Outputs:
        """Return the part of *outputs* that belongs to some of the sequences."""
        rows = _rows(self._named[next(iter(self.packed.values()))], which)
        return tuple(taken(outputs[place], 0, rows) for place in self._outputs)

    def of_some(self, outputs: Outputs, which: Sequence[int]) -> Outputs:
        """Return the same part of what :meth:`some` leads to."""
        return tuple(outputs[place] for place in self._outputs)

    @property
    def _outputs(self) -> list[int]:
        """The places of the outputs with a row for each token."""
        tokens = self._named[next(iter(self.packed))].shape[0]
        return [i for i, out in enumerate(self.case.native) if out.shape[0] == tokens]


def _rows(bounds: Tensor, which: Sequence[int]) -> list[int]:
    edges = bounds.tolist()
    return [row for i in which for row in range(edges[i], edges[i + 1])]


def _packed(packed: dict[str, str], *listed: str) -> Callable[[Case], Packed]:
    return lambda case: Packed(case, packed, listed)


_Q, _K = "cu_seqlens_q", "cu_seqlens_k"
_STARTS, _INITIAL = "query_start_loc", "has_initial_state"
_scanned = _packed(dict.fromkeys(("x", "dt", "b", "c", "z"), _STARTS), "slot_idx", _INITIAL)

_SEQUENCES: dict[str, Callable[[Case], Tokens | Packed]] = {
    "attention_quant": _packed({"query": _Q}, "block_tables", "seq_lens"),
    "causal_attention": _batch("query", "key", "value"),
    "selective_scan": _scanned,
    "ssd_chunk_scan": _scanned,
    "varlen_attention": _packed({"query": _Q, "key": _K, "value": _K}),
    "causal_conv1d": _packed({"x": _STARTS}, "slot_idx", _INITIAL),
    "mla_attention_decode": _packed({"query": _Q}, "block_tables", "seq_lens"),
    "mla_attention_prefill": _packed({"query": _Q, "kv_c": _K, "k_pe": _K}),
    "paged_attention": _packed({"query": _Q}, "block_tables", "seq_lens"),
}
