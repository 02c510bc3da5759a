"""The options of the backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Self

from opweave.compile import compat
from opweave.compile.errors import OptionError
from opweave.ir.errors import did_you_mean

_SWITCHES = (
    "fusion",
    "sequence_parallelism",
    "noop_elimination",
    "plugin_passes",
    "inplace",
    "codegen",
    "eager_rounding",
)
Priorities = Mapping[str, "str | Iterable[str]"]


@dataclass(frozen=True)
class CompileOptions:
    """How a graph is compiled.

    ``torch.compile(model, backend="opweave", options={"fusion": False, "max_autotune": True})``:
    names that are not below go to Inductor.

    Attributes:
        fusion: replace chains of ops by fused ones that have a kernel.
        sequence_parallelism: shard row-wise ops over tokens between collectives.
        noop_elimination: take ops out that change nothing, before others look at the graph.
        plugin_passes: run the passes that plugins and the platform bring.
        inplace: let in-place kernels reuse memory; otherwise they copy their activations.
        codegen: generate code with Inductor; otherwise what is left after the passes runs op by op.
        eager_rounding: round the intermediate results of fused code to their dtype, as eager mode
            does: calls of kernels and pointwise code then give the bits that eager gives with the
            same kernels. Inductor's ``emulate_precision_casts``.
        priorities: priority lists by op, stronger than the scope's.
        required_traits: traits that every implementation must have.
        compile_ranges: other priorities for some numbers of tokens (the size that varies), a graph
            for each: ``{"1-16": {"linear": "opweave_c"}}``. Sizes that no range holds use
            `priorities` alone.
        inductor: what is left, for Inductor.
    """

    fusion: bool = True
    sequence_parallelism: bool = True
    noop_elimination: bool = True
    plugin_passes: bool = True
    inplace: bool = True
    codegen: bool = True
    eager_rounding: bool = False
    priorities: Priorities = field(default_factory=dict)
    required_traits: tuple[str, ...] = ()
    compile_ranges: Mapping[str, Priorities] = field(default_factory=dict)
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> Self:
        """Read what ``torch.compile`` was given.

        Raises:
            OptionError: an option is unknown, or its value is of the wrong kind.
        """
        own = {f.name for f in fields(cls)} - {"inductor"}
        given = {name.replace("-", "_"): value for name, value in (options or {}).items()}
        inductor = {k: v for k, v in given.items() if k not in own}
        known = compat.inductor_option_names() if inductor else set()
        for name in inductor:
            if name not in known:
                raise OptionError(
                    f"unknown option {name!r} of the backend 'opweave'. "
                    f"{did_you_mean(name, own, unlisted=known)} Others go to Inductor."
                )
        rounding = {"emulate_precision_casts": True} if given.get("eager_rounding") else {}
        parsed = cls(
            **{k: v for k, v in given.items() if k in own},
            inductor={**compat.mode_options(mode), **rounding, **inductor},
        )
        parsed.check()
        return parsed

    def check(self) -> None:
        """Raise OptionError if a value is of the wrong kind."""
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"option {name}={value!r} is neither True nor False.")
        for name in ("priorities", "compile_ranges"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise OptionError(f"option {name}={value!r} is no mapping.")
        for text, value in self.compile_ranges.items():
            if not isinstance(value, Mapping):
                raise OptionError(
                    f"option compile_ranges[{text!r}]={value!r} is no mapping of ops to priorities."
                )
        traits = self.required_traits
        if isinstance(traits, str) or not isinstance(traits, Iterable):
            raise OptionError(
                f"option required_traits={traits!r} is no list of traits. Write one, such as "
                "['batch_invariant']."
            )
        ranges = sorted(self.ranges, key=lambda item: item[0])
        for (_, high), (low, _) in pairwise(ranges):
            if low <= high:
                raise OptionError(
                    f"compile_ranges {sorted(self.compile_ranges)}: two ranges hold {low}."
                )

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The compile ranges as (first, last) numbers of tokens."""
        return [parse_range(text) for text in self.compile_ranges]


def parse_range(text: str) -> tuple[int, int]:
    """Read ``"17-4096"`` or ``"1"``.

    >>> parse_range("17-4096")
    (17, 4096)

    Raises:
        OptionError: it is neither.
    """
    first, separator, last = str(text).partition("-")
    try:
        low = int(first)
        high = int(last) if separator else low
    except ValueError:
        low, high = 1, 0
    if not 0 <= low <= high:
        raise OptionError(f"compile range {text!r}: write '17-4096', or '1' for one size.")
    return low, high
