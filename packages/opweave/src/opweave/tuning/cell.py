"""Cells of a tuning file: one op, one family of calls, one bucket of token counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opweave.tuning.contest import Measurement
from opweave.tuning.timing import Time, is_faster
from opweave.tuning.trace import Trace, TracedCall

Key = tuple[str, str, int]
_STATUSES = ("passed", "failed", "rejected", "crashed")


@dataclass(frozen=True)
class Cell:
    """The measurements of a call.

    Attributes:
        op: the name of the op.
        family: dtypes, fixed sizes and other arguments of the call; ``n`` is the tokens.
        tokens: the number of tokens that was measured.
        calls: the number of calls in the trace.
        default: the provider that the call selects without tuning.
        results: the outcome for each provider; its status may also be ``crashed``.
    """

    op: str
    family: str
    tokens: int
    calls: int
    default: str
    results: tuple[Measurement, ...]

    @property
    def key(self) -> Key:
        """Identifies a cell of a tuning file."""
        return (self.op, self.family, bucket(self.tokens))

    @property
    def best(self) -> str:
        """The fastest provider, if it is faster than the default by more than the noise."""
        usual = self.time(self.default)
        best, time = self.default, usual
        for m in self.results:
            if m.time is None or (usual is not None and not is_faster(m.time, usual)):
                continue
            if time is None or m.time.microseconds < time.microseconds:
                best, time = m.provider, m.time
        return best

    def time(self, provider: str) -> Time | None:
        """Return the time of a provider, if its result is right."""
        return next((m.time for m in self.results if m.provider == provider), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as plain data."""
        results = [
            {
                "provider": m.provider,
                "status": m.status,
                **({"reason": m.reason} if m.reason else {}),
                **(
                    {"microseconds": round(m.time.microseconds, 3), "noise": round(m.time.noise, 4)}
                    if m.time
                    else {}
                ),
            }
            for m in self.results
        ]
        return {
            "op": self.op, "family": self.family, "tokens": self.tokens, "calls": self.calls,
            "default": self.default, "best": self.best, "results": results,
        }  # fmt: skip

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Cell:
        """Return the cell in a tuning file; raises KeyError, TypeError or ValueError."""
        tokens, calls = (_checked(given, name, int) for name in ("tokens", "calls"))
        op, family, default = (_checked(given, name, str) for name in ("op", "family", "default"))
        results = tuple(map(_result, given["results"]))
        return cls(op, family, tokens, calls, default, results)


def _result(given: Mapping[str, Any]) -> Measurement:
    provider, status = (_checked(given, name, str) for name in ("provider", "status"))
    if status not in _STATUSES:
        raise ValueError(f"status {status!r} should be one of {', '.join(_STATUSES)}")
    time = None
    if "microseconds" in given:
        time = Time(*(_checked(given, name, int, float) for name in ("microseconds", "noise")))
    return Measurement(provider, status, str(given.get("reason", "")), time)


def _checked(given: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """Return the field *name*, of one of *kinds*; numbers are not negative."""
    found = given[name]
    is_known = isinstance(found, kinds) and not isinstance(found, bool)
    # A comparison with NaN is false.
    if not is_known or (isinstance(found, int | float) and not found >= 0):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} {found!r:.40} should be {names}, not negative")
    return found


def bucket(tokens: int) -> int:
    """Return the bucket of a number of tokens: the next power of two.

    Examples:
        >>> [bucket(tokens) for tokens in (0, 1, 2, 3, 16, 17)]
        [0, 1, 2, 4, 16, 32]
    """
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


def family_of(call: TracedCall) -> str:
    """Return the arguments of a call except for the number of tokens."""
    parts = (f"{name} {_family(given, call.tokens)}" for name, given in call.arguments.items())
    return ", ".join(parts)


def cells_to_measure(trace: Trace, done: Iterable[Key] = ()) -> list[TracedCall]:
    """Return the most frequent call of each cell that is not *done*, most frequent first.

    Ops with a single implementation are left out.

    Raises:
        UnknownOpError, TraceError: a call does not fit its op.
    """
    known, found = set(done), dict[Key, TracedCall]()
    for call in trace.calls:
        key = (call.op, family_of(call), bucket(call.tokens))
        if key in known or len(trace.op(call).supported_providers()) < 2:
            continue
        if key not in found or call.count > found[key].count:
            found[key] = call
    return sorted(found.values(), key=lambda call: -call.count)


def _family(given: Mapping[str, Any], tokens: int) -> str:
    if given["type"] == "list":
        return f"[{', '.join(_family(item, tokens) for item in given['items'])}]"
    if "shape" not in given:
        return repr(given["value"])
    first, rest = given["shape"][:1], given["shape"][1:]
    sizes = [*("n" if size == tokens else str(size) for size in first), *map(str, rest)]
    strides = "" if _is_contiguous(given) else f" strides {given['stride']}"
    return f"{given['dtype']}[{','.join(sizes)}]{strides}"


def _is_contiguous(given: Mapping[str, Any]) -> bool:
    expected = 1
    for size, step in zip(reversed(given["shape"]), reversed(given["stride"]), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
