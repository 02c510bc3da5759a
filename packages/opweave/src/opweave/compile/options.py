"""Backend options, errors of compilation, and the package logger."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Self

from opweave.compile import compat
from opweave.ir import IrError
from opweave.ir.errors import did_you_mean

# The package logger. Set ``OPWEAVE_LOGGING_LEVEL=DEBUG`` to see its debug messages.


logger = logging.getLogger("opweave.compile")


# Errors raised during compilation.


class CompileError(IrError):
    """Base class of the errors that opweave.compile raises."""


class UseAfterDonationError(CompileError):
    """A tensor, or a view of it, is read after it was donated to ``maybe_inplace``."""


class OptionError(CompileError):
    """A backend option is unknown or has an invalid value."""


class PluginPassError(CompileError):
    """A plugin's compiler pass failed, does not exist or is not a valid pass."""


class UnloweredOpError(CompileError):
    """An IR op would have reached code generation."""


# Backend options.


Priorities = Mapping[str, "str | Iterable[str]"]


@dataclass(frozen=True)
class CompileOptions:
    """Options of the ``"opweave"`` backend.

    ``torch.compile(model, backend="opweave", options={"fusion": False, "max_autotune": True})``.
    Options that are not listed here are passed to Inductor.

    Attributes:
        recognition: in inference, call ops in place of the PyTorch operators that spell them.
        fusion: replace chains of ops by composites that have a kernel.
        sequence_parallelism: shard row-wise ops over tokens between collectives.
        noop_elimination: remove no-op views and duplicate splits before fusion.
        plugin_passes: run the compiler passes of plugins and of the platform.
        inplace: let in-place kernels reuse memory; if False, their activations are copied.
        codegen: generate code with Inductor; if False, the lowered graph runs op by op.
        eager_rounding: round intermediate results in fused code to their dtype, as eager mode
            does, so that the results are bitwise equal to eager mode with the same kernels. Sets
            Inductor's ``emulate_precision_casts``.
        priorities: priority lists by op; they override those of ``ir.priority`` scopes.
        required_traits: traits that every implementation must have.
        compile_ranges: priorities for ranges of the number of tokens (the dynamic size), each with
            a graph of its own: ``{"1-16": {"linear": "opweave_c"}}``. Sizes outside all ranges use
            `priorities` only.
        inductor: the remaining options, for Inductor.
    """

    recognition: bool = True
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
        """Parse the ``options`` and ``mode`` arguments of ``torch.compile``.

        Raises:
            OptionError: an option is unknown or has an invalid value.
        """
        names = {f.name for f in fields(cls)} - {"inductor"}
        values = {name.replace("-", "_"): value for name, value in (options or {}).items()}
        inductor = {name: values.pop(name) for name in list(values) if name not in names}
        inductor_names = compat.inductor_option_names() if inductor else set()
        for name in inductor:
            if name not in inductor_names:
                raise OptionError(
                    f"unknown option {name!r} of the backend 'opweave'. "
                    f"{did_you_mean(name, names, unlisted=inductor_names)} "
                    "Inductor's options work too."
                )
        rounding = {"emulate_precision_casts": True} if values.get("eager_rounding") else {}
        parsed = cls(**values, inductor={**compat.mode_options(mode), **rounding, **inductor})
        parsed.check()
        return parsed

    def check(self) -> None:
        """Raise OptionError if an option has an invalid value."""
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(option.default, bool) and not isinstance(value, bool):
                raise OptionError(f"option {option.name}={value!r} is neither True nor False.")
        for name in ("priorities", "compile_ranges"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise OptionError(f"option {name}={value!r} is not a mapping.")
        for text, value in self.compile_ranges.items():
            if not isinstance(value, Mapping):
                raise OptionError(
                    f"option compile_ranges[{text!r}]={value!r} does not map ops to priorities; "
                    "write {'1-16': {'linear': 'opweave_c'}}."
                )
        traits = self.required_traits
        if isinstance(traits, str) or not isinstance(traits, Iterable):
            raise OptionError(
                f"option required_traits={traits!r} is not a list of traits; write a list such as "
                "['batch_invariant']."
            )
        ranges = sorted(self.ranges, key=lambda item: item[0])
        for (_, high), (low, _) in pairwise(ranges):
            if low <= high:
                raise OptionError(
                    f"compile_ranges {sorted(self.compile_ranges)}: two ranges contain {low}."
                )

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The compile ranges as inclusive (first, last) token counts."""
        return [parse_range(text) for text in self.compile_ranges]


def parse_range(text: str) -> tuple[int, int]:
    """Parse an inclusive range such as ``"17-4096"``, or a single size such as ``"1"``.

    >>> parse_range("17-4096")
    (17, 4096)

    Raises:
        OptionError: *text* is neither.
    """
    first, separator, last = str(text).partition("-")
    try:
        low = int(first)
        high = int(last) if separator else low
    except ValueError:
        low, high = 1, 0
    if not 0 <= low <= high:
        raise OptionError(f"invalid compile range {text!r}; write '17-4096', or '1' for one size.")
    return low, high
