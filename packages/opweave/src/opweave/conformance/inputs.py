"""Arguments for cases: sizes, dtypes, layouts, scalars and token dimensions."""

from __future__ import annotations

import inspect
import re
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from opweave.conformance.snapshot import Values
from opweave.conformance.subject import Case, Outputs, Subject

# Arguments from an op's input generator: sizes with and without tails, dtypes, no tokens.


Generator = Callable[[Subject], Iterable[Case]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOKENS = (1, 2, 3, 7, 8, 33)
_WIDTHS = (1, 2, 3, 8, 17, 31, 62, 64, 66, 128, 129, 256, 512, 1000, 4096, 4097)
_COUNTS = (1, 2, 3, 5, 8)
_PART_SIZES = (*_COUNTS, 32, 64, 80, 96, 128, 256)  # of a head, a state, a block
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
WIDE = 24  # a size of at least this is the width of a row; a smaller one is a part or a count
_SWEPT_SIZES = (*range(1, 131), 255, 257, 511, 513, 1023, 1025)  # block bounds among them
_SWEEP_SECONDS = 2.0  # of processor time, for the sizes of one option
_MANY_TOKENS = 150  # more than many windows have
_SLOW_SECONDS = 0.1  # after a slower case, larger numbers of tokens are left out


def options_of(subject: Subject) -> dict[str, Any]:
    """Return the options of the op's input generator with their defaults."""
    parameters = inspect.signature(subject.op.input_generator).parameters
    return {name: p.default for name, p in parameters.items()}


def arguments(subject: Subject, **options: Any) -> Values:
    """Return the inputs of the op's generator for the options; its exceptions pass through."""
    device = {"device": subject.device} if "device" in options_of(subject) else {}
    args = subject.op.generate_inputs(**{**dict(subject.options), **options}, **device)
    return subject.op.bind(*args)


def generated(subject: Subject, **options: Any) -> Case | None:
    """Return a case from the generator, or None if it does not accept the options."""
    if not options.keys() <= options_of(subject).keys():
        return None
    try:
        values = arguments(subject, **options)
    except (ValueError, RuntimeError, ZeroDivisionError, LookupError, TypeError):
        return None  # sizes that do not fit each other
    label = _label({**dict(subject.options), **options})
    return Case(subject.op, label, values, subject.provider)


def usual(subject: Subject, dtypes: int | None = None) -> Iterator[Case]:
    """Yield one case for each dtype, or for a limited number of them."""
    for dtype in _dtype_options(subject)[:dtypes]:
        yield from existing(subject, dtype)


def sizes(subject: Subject) -> Iterator[Case]:
    """Yield cases of every dtype and many sizes."""
    for dtype in _dtype_options(subject):
        for count in TOKENS:
            yield from existing(subject, {"num_tokens": count, **dtype})
        for name, default in options_of(subject).items():
            for value in variants(subject, name, default):
                yield from existing(subject, {name: value, **dtype})
    for name, default in options_of(subject).items():
        if name == "num_tokens" or (type(default) is int and default >= WIDE):
            yield from _swept(subject, name)


def while_fast(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield *cases* until one takes too long, including the time of its consumer."""
    start = time.perf_counter()
    for case in cases:
        yield case
        if time.perf_counter() - start > _SLOW_SECONDS:
            return
        start = time.perf_counter()


def few_and_many(subject: Subject) -> Iterator[Case]:
    """Yield cases with one token, and with more tokens than one tile or thread processes."""
    counts = (1, 33, 257, 1031, 4099)
    yield from while_fast(c for n in counts for c in existing(subject, {"num_tokens": n}))


def chained(*generators: Generator) -> Generator:
    """Return a generator of the cases of all *generators*, one after the other."""
    return lambda subject: chain.from_iterable(generate(subject) for generate in generators)


def empty(subject: Subject) -> Iterator[Case]:
    """Yield cases without tokens."""
    yield from of_tokens(subject, 0)


def tails(subject: Subject) -> Iterator[Case]:
    """Yield cases with one odd width."""
    for name in ("hidden_size", "head_size"):
        yield from existing(subject, {name: 65})


def of_tokens(subject: Subject, count: int, dtypes: int | None = None) -> Iterator[Case]:
    """Yield one case of *count* tokens for each dtype, or for a limited number of them."""
    for dtype in _dtype_options(subject)[:dtypes]:
        yield from existing(subject, {"num_tokens": count, **dtype})


def _dtype_options(subject: Subject) -> list[dict[str, Any]]:
    """Return the options that lead to each dtype."""
    if "dtype" not in options_of(subject):
        return [{}]
    return [{"dtype": dtype} for dtype in DTYPES]


def _swept(subject: Subject, name: str) -> Iterator[Case]:
    """Yield cases of every size of one option in a drawn order, as many as there is time for."""
    dtypes, start = _dtype_options(subject), subject.seconds
    for place in torch.randperm(len(_SWEPT_SIZES)).tolist():
        if subject.seconds - start > _SWEEP_SECONDS:
            return
        yield from existing(subject, {name: _SWEPT_SIZES[place], **dtypes[place % len(dtypes)]})


def variants(subject: Subject, name: str, default: Any) -> tuple[Any, ...]:
    """Return the values to try of an option of the generator instead of its default."""
    if name in ("num_tokens", "dtype", "device"):
        return ()
    if isinstance(default, str) and name in subject.op.schema.names:
        place = subject.op.schema.names.index(name)
        words = [word for case in existing(subject, {}) for word in _words(case, place)]
        return tuple(word for word in words if generated(subject, **{name: word}))
    if isinstance(default, torch.dtype):
        return _EIGHT_BITS if default.itemsize == 1 else DTYPES
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, int):
        parts = _PART_SIZES if name.endswith("size") else _COUNTS
        sizes = _WIDTHS if default >= WIDE else parts
        return tuple(sorted({*sizes, 2 * default} - {default}))
    return ()


def existing(subject: Subject, options: Mapping[str, Any]) -> Iterator[Case]:
    case = generated(subject, **options)
    if case is not None:
        yield case


def _label(options: Mapping[str, Any]) -> str:
    parts = (f"{k}={str(v).removeprefix('torch.')}" for k, v in options.items())
    return ", ".join(parts) or "usual"


def accepts_any(subject: Subject) -> bool:
    """Whether the implementation accepts any of the usual arguments."""
    return any(case.refusal is None and subject.accepts(case.values) for case in usual(subject))


def with_accepted_sizes(subject: Subject) -> Subject | None:
    """Return *subject* with options of the generator for which it accepts the usual arguments.

    A kernel may support only some sizes. One option is changed at a time. None: no option helps.
    """
    changes: list[dict[str, Any]] = [{}]
    for name, default in options_of(subject).items():
        changes += [{name: value} for value in variants(subject, name, default)]
    for change in changes:
        options = tuple({**dict(subject.options), **change}.items())
        tried = replace(subject, options=options)
        if accepts_any(tried):
            return tried
    return None


# Arguments of different dtypes: weights wider or narrower than activations, other integers.


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def mixed(subject: Subject) -> Iterator[Case]:
    """Yield cases with one tensor, or all that are not activations, in another dtype."""
    activations = subject.op.activation_indices
    for base in usual(subject):
        places = [i for i, v in enumerate(base.values) if isinstance(v, Tensor)]
        rest = [i for i in places if i not in activations]
        for group in {tuple(g): None for g in (rest, *([i] for i in places)) if g}:
            for kind in (_FLOATS, _INTEGERS):
                yield from _cast(base, group, kind)


def other_dtypes(value: Tensor) -> list[torch.dtype]:
    """Return the dtypes that a tensor may have instead."""
    kinds = (kind for kind in (_FLOATS, _INTEGERS) if value.dtype in kind)
    return [dtype for kind in kinds for dtype in kind if dtype is not value.dtype]


def _cast(base: Case, group: tuple[int, ...], kind: tuple[torch.dtype, ...]) -> Iterator[Case]:
    for dtype in kind:
        changed = [i for i in group if base.values[i].dtype in set(kind) - {dtype}]
        if changed:
            names = " and ".join(base.op.schema.names[i] for i in changed)
            label = f"{names} {str(dtype).removeprefix('torch.')}"
            yield base.replaced(label, {i: base.values[i].to(dtype) for i in changed})


# Memory layouts of the same values, with NaN in the gaps.
#
# A kernel that reads past a row reads NaN. A write into a gap is detected by comparing its
# bytes.


Layout = Callable[[Tensor], Tensor]
_MARGIN_ELEMENTS = 3  # odd, so that rows are not aligned


def sliced(t: Tensor) -> Tensor:
    """Rows inside wider rows, starting in the middle of one."""
    wide = _filled(t, (*t.shape[:-1], t.shape[-1] + 2 * _MARGIN_ELEMENTS))
    return wide.narrow(-1, _MARGIN_ELEMENTS, t.shape[-1]).copy_(t)


def offset(t: Tensor) -> Tensor:
    """Contiguous, one element into its storage."""
    return _filled(t, (t.numel() + 2,))[1:-1].view(t.shape).copy_(t)


def stepped(t: Tensor) -> Tensor:
    """Every second row of a tensor, or every second element of a vector."""
    twice = _filled(t, (2 * t.shape[0], *t.shape[1:]))
    return twice[::2].copy_(t)


def scattered(t: Tensor) -> Tensor:
    """Every second element of each row."""
    return _filled(t, (*t.shape[:-1], 2 * t.shape[-1]))[..., ::2].copy_(t)


def transposed(t: Tensor) -> Tensor:
    """The last two dimensions exchanged in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t


def rotated(t: Tensor) -> Tensor:
    """The first two dimensions exchanged in memory; rows stay rows."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim > 2 else t


def expanded(t: Tensor) -> Tensor:
    """The first row, repeated without memory of its own."""
    return t[:1].expand(t.shape) if t.ndim > 1 and t.shape[0] else t


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (sliced, offset, stepped, scattered, transposed, rotated, expanded)
}


def shapes(subject: Subject) -> Iterator[Case]:
    """Yield cases with other shapes than the generator's, most of which native rejects.

    Half of the columns of one or two tensors, and a number for each row or column of the result in
    place of one for all.
    """
    for base in usual(subject, 1):
        tensors = {i: v for i, v in enumerate(base.values) if isinstance(v, Tensor)}
        floats = {i: v for i, v in tensors.items() if v.is_floating_point() and v.ndim}
        rows, columns = (1, 1, *(() if base.refusal else base.native[0].shape))[-2:]
        for i, v in floats.items():
            for shape in ((rows, 1), (1, columns)) if v.numel() == 1 else ():
                numbers = (v.flatten() * (0.5 + torch.rand(shape, device=v.device))).to(v.dtype)
                yield base.replaced(f"{base.op.schema.names[i]} of shape {shape}", {i: numbers})
        for group in (*combinations(floats, 1), *combinations(floats, 2)):
            halves = {i: floats[i].tensor_split(2, -1)[0].contiguous() for i in group}
            names = " and ".join(base.op.schema.names[i] for i in group)
            yield base.replaced(f"half of {names}", halves)


def laid_out(subject: Subject, dtypes: int | None = None) -> Iterator[Case]:
    """Yield cases in every layout: of all tensors at once, and of each alone."""
    for base in usual(subject, dtypes):
        places = [i for i, v in enumerate(base.values) if isinstance(v, Tensor) and v.ndim]
        for name, layout in LAYOUTS.items():
            matrices = [i for i in places if base.values[i].ndim > 1]
            groups = [matrices, places, *([i] for i in places)]
            for group in {tuple(g): None for g in groups if g}:
                label = f"{' and '.join(subject.op.schema.names[i] for i in group)} {name}"
                yield base.replaced(label, {i: layout(base.values[i]) for i in group})


def _filled(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return new memory with NaN, or with 0, which is also a valid index."""
    # Not every device of torch can fill an 8-bit float with NaN.
    has_nan = t.is_floating_point() and t.dtype.itemsize > 1
    return torch.full(shape, float("nan") if has_nan else 0, dtype=t.dtype, device=t.device)


# Cases with unusual numbers, flags and strings, and with omitted optional arguments.


def options(subject: Subject) -> Iterator[Case]:
    """Yield cases with one changed number, flag or string, and integers with many tokens."""
    for kind, bases in (object, usual(subject)), (int, of_tokens(subject, _MANY_TOKENS, 1)):
        for base in bases:
            for i, param in enumerate(subject.op.schema.params):
                for value in others(base, i):
                    if kind is object or type(value) is int:
                        yield replaced(base, i, param.name, value)


def without(subject: Subject) -> Iterator[Case]:
    """Yield cases without optional tensors: each alone, then all."""
    for base in usual(subject):
        params = enumerate(subject.op.schema.params)
        optional = [i for i, p in params if p.is_tensor and p.is_optional]
        for i in optional:
            yield replaced(base, i, subject.op.schema.names[i], None)
        if len(optional) > 1:
            yield base.replaced("no optional tensor", dict.fromkeys(optional))


def replaced(case: Case, index: int, name: str, value: Any) -> Case:
    """Return *case* with another value of one argument."""
    return case.replaced(f"{name}={value!r}", {index: value})


def others(case: Case, index: int) -> list[Any]:
    """Return alternatives to an argument that is not a tensor; native may reject them."""
    param, value = case.op.schema.params[index], case.values[index]
    if param.is_tensor or param.is_tensor_list:
        return []
    kinds = set(typing.get_args(param.annotation) or (param.annotation,))
    candidates: list[Any] = [None] if param.is_optional and value is not None else []
    if bool in kinds:
        candidates += [True, False]
    elif float in kinds:
        # Large enough to show where epsilon is added.
        candidates += [0.5, 0.1, 1.7] if value is None else [0.1 + 4 * value]
    elif str in kinds:
        candidates += ["?", *_words(case, index)]
    elif int in kinds and param.is_optional:
        candidates += [1, 2, 7, 40, 100, 300]
    elif type(value) is int:
        candidates += [0, 1, value - 1, value + 1]
    return [other for other in dict.fromkeys(candidates) if other is None or other != value]


def _words(case: Case, index: int) -> list[str]:
    """Return the words of the message with which native rejects an unknown string."""
    return re.findall(r"\w+", str(case.replaced("", {index: "?"}).refusal or ""))


# Finds the token dimension of each tensor, and selects tokens.
#
# Compares inputs for two numbers of tokens. If tokens interact, as in attention, a row is a
# sequence, and a function from the table selects sequences.


_TOKENS_COUNTS = (13, 29)  # unlikely to equal another size
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
    if "num_seqs" in options_of(subject):
        options = {"num_seqs": _SEQUENCE_COUNT, **options}
    counts = _TOKENS_COUNTS if count is None else (*_TOKENS_COUNTS, count)
    cases = [generated(subject, num_tokens=n, **options) for n in counts]
    if any(case is None or case.refusal for case in cases):
        return None
    usable = [case for case in cases if case is not None]
    first, second, last = usable[0], usable[1], usable[-1]
    if subject.op.name in _SEQUENCES:
        return _SEQUENCES[subject.op.name](last)
    arguments = tuple(map(_axis, first.values, second.values))
    outputs = tuple(map(_axis, first.native, second.native))
    if all(axis is None for axis in arguments) or all(axis is None for axis in outputs):
        return None
    return Tokens(counts[-1], last, arguments, outputs)


_TOKEN_SHAPES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "rows in two dimensions": (6, (2, 3)),
    "rows in three dimensions": (6, (3, 1, 2)),
    "a batch of one": (3, (1, 3)),
    "no rows in two dimensions": (0, (2, 0)),
    "a row without its dimension": (1, ()),
}
"""The number of tokens, and the shape that replaces their dimension."""


def dimensions(subject: Subject) -> Iterator[Case]:
    """Yield cases with other numbers of token dimensions, and with numbers without a dimension."""
    tokens = tokens_of(subject)
    if not isinstance(tokens, Tokens) or not tokens.are_rows:
        return
    for name, (count, sizes) in _TOKEN_SHAPES.items():
        for case in of_tokens(subject, count):
            pairs = list(zip(case.values, tokens.inputs, strict=True))
            values = [v if a is None else _formed(v, a, sizes) for v, a in pairs]
            yield case.with_values(name, values)
    for case in existing(subject, {"num_tokens": 1, "hidden_size": 1}):
        activations = {i: case.values[i] for i in subject.op.activation_indices}
        if all(isinstance(v, Tensor) and v.numel() == 1 for v in activations.values()):
            numbers = {i: v.reshape(()) for i, v in activations.items()}
            yield case.replaced("numbers without a dimension", numbers)


def _formed(t: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    return t.reshape((*t.shape[:axis], *sizes, *t.shape[axis + 1 :]))


def _axis(a: Any, b: Any) -> Axis:
    if not isinstance(a, Tensor) or a.ndim != b.ndim:
        return None
    pairs = enumerate(zip(a.shape, b.shape, strict=True))
    return next((i for i, sizes in pairs if sizes == _TOKENS_COUNTS), None)


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
        parts = dict(named)
        for name, bounds in self.packed.items():
            parts[name] = taken(named[name], 0, _rows(named[bounds], which))
        for name in set(self.packed.values()):
            lengths = taken(named[name].diff(), 0, which)
            parts[name] = torch.cat((named[name][:1], lengths.cumsum(0))).to(named[name].dtype)
        for name in self.listed:
            parts[name] = taken(named[name], 0, which)
        return tuple(parts.values())

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
