"""Drawn arguments: sizes, dtypes, layouts, scalars and omitted tensors together.

The draws cover every pair of levels of two factors. A level is a kind of value, such as a size next
to a power of two; the value itself is drawn. A finding is reduced before it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from opweave.conformance import inputs
from opweave.conformance.inputs import LAYOUTS, Tokens, tokens_of
from opweave.conformance.subject import Case, Examine, Findings, Subject, accepted, seeded

_MAX_CASES = 150
_SECONDS = 6.0  # of processor time; a slow op gets fewer cases
_CANDIDATES = 12  # for a draw; the one with the most new pairs is taken
_COSTLY_OPTIONS = ("long_context",)  # of generators; drawn seldom
_USUAL = "usual"
_LARGE_SIZE = 300  # one dimension of at least this size is enough in a case
_SHRINK_TRIES = 60
# After a slower case, larger sizes are left out; each takes twice to four times as long.
_SLOW_SECONDS = 0.25
_LARGEST = 1 << 17
# Positions of arguments that bound the keys of the first sequence.
_BOUNDS = {"cu_seqlens_k": 1, "seq_lens": 0}


def _up_to(least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, ()))


def _one_of(values: Sequence[Any]) -> Any:
    return values[_up_to(0, len(values) - 1)]


Sizes = Mapping[str, Callable[[], int]]

# Levels of sizes; widths are those of vectors, powers of two, and their neighbors.
_WIDTHS: Sizes = {
    "tiny": lambda: _up_to(1, 7),
    "a vector": lambda: 8 << _up_to(0, 4),
    "next to a vector": lambda: (8 << _up_to(0, 3)) + _one_of((-1, 1)),
    "a power of two": lambda: 128 << _up_to(0, 3),
    "next to a power of two": lambda: (128 << _up_to(0, 3)) + _one_of((-1, 1)),
    "any": lambda: _up_to(1, 300),
}
_TOKENS: Sizes = {
    "one": lambda: 1,
    "few": lambda: _up_to(2, 9),
    "next to a vector": lambda: (8 << _up_to(0, 2)) + _one_of((-1, 0, 1)),
    "many": lambda: _up_to(130, 400),
}
_PARTS: Sizes = {
    "small": lambda: _up_to(1, 8),
    "even": lambda: 2 * _up_to(1, 24),
    "a vector": lambda: 16 << _up_to(0, 4),
}
_COUNTS: Sizes = {"few": lambda: _up_to(1, 9), "many": lambda: _up_to(10, 40)}


@dataclass(frozen=True)
class Drawn:
    """The drawn properties of a case.

    Attributes:
        seed: the seed of the numbers.
        options: options of the input generator.
        scalars: other values of arguments that are not tensors, and None for omitted tensors.
        dtypes: other dtypes of tensors.
        layouts: layouts of tensors.
        rows: the sizes that replace the token dimension of activations.
        keyless: whether the first sequence has no keys.
    """

    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[int, Any] = field(default_factory=dict)
    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)
    layouts: Mapping[int, str] = field(default_factory=dict)
    rows: int = 1
    keyless: bool = False

    def case(self, subject: Subject, tokens: Tokens | None) -> Case | None:
        """Return the case, or None if the generator or the op does not accept it."""
        with seeded(self.seed):
            case = inputs.generated(subject, **self.options)
        if case is None:
            return None
        names = subject.op.schema.names
        values = {**dict(enumerate(case.values)), **self.scalars}
        labels = [f"{names[i]}={value!r}" for i, value in self.scalars.items()]
        for i, dtype in self.dtypes.items():
            if isinstance(values[i], Tensor):
                values[i] = values[i].to(dtype)
        if self.keyless:
            for i, name in enumerate(names):
                if name in _BOUNDS:
                    values[i] = values[i].clone()
                    values[i][_BOUNDS[name]] = 0
            labels.append("a sequence without keys")
        if self.rows > 1 and tokens is not None:
            for i, axis in enumerate(tokens.inputs):
                if axis is not None and isinstance(values[i], Tensor):
                    size = values[i].shape[axis]
                    batches = self.rows if size % self.rows == 0 else 1
                    values[i] = values[i].unflatten(axis, (batches, size // batches))
            labels.append(f"rows in {self.rows} batches")
        for i, layout in self.layouts.items():
            if isinstance(values[i], Tensor) and values[i].ndim:
                values[i] = LAYOUTS[layout](values[i])
                labels.append(f"{names[i]} {layout}")
        return case.replaced(", ".join(labels), values) if labels or self.dtypes else case

    def simpler(self, subject: Subject) -> Iterator[Drawn]:
        """Yield draws with one change less, or a smaller size."""
        for name in ("scalars", "dtypes", "layouts", "options"):
            changes = getattr(self, name)
            for key in changes:
                fewer: Any = {name: {k: v for k, v in changes.items() if k != key}}
                yield replace(self, **fewer)
        yield from [replace(self, rows=1)] if self.rows > 1 else []
        yield from [replace(self, keyless=False)] if self.keyless else []
        for name, value in self.options.items():
            if type(value) is int:
                for less in (value // 2, value - value // 4, value - 1):
                    if 0 < less < value:
                        yield replace(self, options={**self.options, name: less})


Level = tuple[str, Callable[[Drawn], Drawn]]


def _factors(subject: Subject, usual: Case, tokens: Tokens | None) -> list[list[Level]]:
    """Return the factors that may be drawn, each with its levels; the first one is the usual."""
    unchanged: Level = (_USUAL, lambda drawn: drawn)

    def change(of: str, keys: Sequence[Any], value: Callable[[], Any]) -> Callable[[Drawn], Drawn]:
        def apply(drawn: Drawn) -> Drawn:
            more: Any = {of: {**getattr(drawn, of), _one_of(keys): value()}}
            return replace(drawn, **more)

        return apply

    factors: list[list[Level]] = []
    for name, default in inputs.options_of(subject).items():
        factors.append([unchanged])
        for level, value in _levels(subject, name, default).items():
            factors[-1].append((f"{name} {level}", change("options", [name], value)))
    for i, param in enumerate(subject.op.schema.params):
        value = usual.values[i]
        factors.append([unchanged])
        if isinstance(value, Tensor):
            others = [None] if param.is_optional else []
        else:
            others = [v for v in inputs.others(usual, i) if not usual.replaced("", {i: v}).refusal]
        for other in others:
            level = f"{param.name} {other!r}"
            factors[-1].append((level, change("scalars", [i], partial(_same, other))))
    tensors = [i for i, v in enumerate(usual.values) if isinstance(v, Tensor) and v.ndim]
    # Two tensors have factors of their own, one of the others has them together.
    for group in [*([i] for i in tensors[:2]), tensors[2:]]:
        cast = [i for i in group if inputs.other_dtypes(usual.values[i])]
        choices = [dtype for i in cast[:1] for dtype in inputs.other_dtypes(usual.values[i])]
        factors.append([unchanged])
        for dtype in choices:
            level = f"{group[0]} {dtype}"
            factors[-1].append((level, change("dtypes", cast[:1], partial(_same, dtype))))
        factors.append([unchanged])
        for name in LAYOUTS if group else ():
            level = f"{group[0]} {name}"
            factors[-1].append((level, change("layouts", group, partial(_same, name))))
    if tokens is not None and tokens.are_rows:
        batches = [(f"{n} batches", partial(replace, rows=n)) for n in (2, 3)]
        factors.append([unchanged, *batches])
    if not _BOUNDS.keys().isdisjoint(subject.op.schema.names):
        factors.append([unchanged, ("no keys", partial(replace, keyless=True))])
    return [levels for levels in factors if len(levels) > 1]


def _same(value: Any) -> Any:
    return value


def _levels(subject: Subject, name: str, default: Any) -> Mapping[str, Callable[[], Any]]:
    if name == "num_tokens":
        return _TOKENS
    if name == "dtype" and default in inputs.DTYPES:
        return {str(dtype): partial(_same, dtype) for dtype in inputs.DTYPES}
    if type(default) is int and name != "device":
        parts = _PARTS if name.endswith("size") else _COUNTS
        return _WIDTHS if default >= inputs.WIDE else parts
    return {str(value): partial(_same, value) for value in inputs.variants(subject, name, default)}


def _draws(factors: list[list[Level]]) -> Iterator[Drawn]:
    """Yield draws until they have had every pair of levels of two factors."""
    pairs = [product(a, b) for a, b in combinations(factors, 2)]
    missing = {frozenset((a, b)) for pair in pairs for (a, _), (b, _) in pair}
    missing = {pair for pair in missing if _USUAL not in pair}
    for number in range(_MAX_CASES):
        best, covered = [levels[0] for levels in factors], set[frozenset[str]]()
        for _ in range(_CANDIDATES):
            levels = [_level(levels) for levels in factors]
            names = [name for name, _ in levels if name != _USUAL]
            new = missing & set(map(frozenset, combinations(names, 2)))
            if len(new) >= len(covered):
                best, covered = levels, new
        missing -= covered
        drawn = Drawn(_up_to(0, 1 << 30))
        for _, change in best:
            drawn = change(drawn)
        yield drawn
        if not missing and number > _MAX_CASES // 2:
            return


def _level(levels: list[Level]) -> Level:
    costly = levels[1][0].startswith(_COSTLY_OPTIONS)
    return levels[0] if torch.rand(()) < (0.95 if costly else 0.5) else _one_of(levels[1:])


def drawn(examine: Examine) -> Callable[[Subject], Findings]:
    """Return a check that runs *examine* on drawn cases."""

    def run(subject: Subject) -> Findings:
        usual = next(inputs.usual(subject), None)
        if usual is None or usual.refusal is not None:
            return
        tokens = tokens_of(subject)
        rows = tokens if isinstance(tokens, Tokens) else None
        start = subject.seconds
        for draw in _draws(_factors(subject, usual, rows)):
            if subject.seconds - start > _SECONDS:
                return
            for valid, case in _accepted(subject, _small(draw), rows):
                for finding in accepted(subject, case, examine):
                    yield finding and _reduced(subject, valid, rows, examine, finding)

    return run


def _small(draw: Drawn) -> Drawn:
    """Return *draw* with at most one large size."""
    large = [n for n, v in draw.options.items() if type(v) is int and v >= _LARGE_SIZE]
    return replace(draw, options={n: v for n, v in draw.options.items() if n not in large[1:]})


def _accepted(subject: Subject, draw: Drawn, tokens: Tokens | None) -> Iterator[tuple[Drawn, Case]]:
    """Yield *draw* without the changes that native does not accept together, and its case."""
    while True:
        case = draw.case(subject, tokens)
        if case is not None and case.refusal is None and subject.accepts(case.values):
            yield draw, case
            return
        simpler = [d for d in draw.simpler(subject) if len(d.options) < len(draw.options)]
        simpler = simpler or list(draw.simpler(subject))
        if not simpler:
            return
        draw = _one_of(simpler)


def _reduced(
    subject: Subject, draw: Drawn, tokens: Tokens | None, examine: Examine, finding: str
) -> str:
    """Return the finding of the simplest draw that is also wrong."""
    tries = 0
    for _ in range(_SHRINK_TRIES):
        for simpler in draw.simpler(subject):
            tries += 1
            case = simpler.case(subject, tokens) if tries < _SHRINK_TRIES else None
            again = None if case is None else next(accepted(subject, case, examine), None)
            if again:
                draw, finding = simpler, again
                break
        else:
            return finding
    return finding


# One large size of each dimension: beyond 16-bit indices, and many blocks.


def large(subject: Subject) -> Iterator[Case]:
    """Yield cases with ever larger sizes of one dimension, until a case is slow."""
    known = inputs.options_of(subject)
    sizes = [name for name, value in known.items() if type(value) is int]
    for name in sizes:
        others: dict[str, Any] = {n: 8 for n in sizes if n != name and known[n] >= inputs.WIDE}
        if "output_size" in known and name != "output_size":
            others["output_size"] = 3
        size = _LARGE_SIZE
        while size <= _LARGEST:
            start = subject.seconds
            case = inputs.generated(subject, **{**others, name: size + _up_to(1, 9)})
            case = case or inputs.generated(subject, **{**others, name: size})
            case = case or inputs.generated(subject, **{name: size})
            if case is None:
                break
            yield case
            if size == 4 * _LARGE_SIZE and known.get("dtype") in inputs.DTYPES:
                # Long sums need more than 16 bits.
                yield from inputs.existing(subject, {**others, name: size, "dtype": torch.bfloat16})
            if subject.seconds - start > _SLOW_SECONDS:
                break
            size *= 2
