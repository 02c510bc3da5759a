"""Every environment variable that opweave reads, in one table.

The docs page is generated from it. Variables are read once, on first use of an op.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from opweave.ir.errors import SettingError, did_you_mean

COMPILATION_PREFIX = "OPWEAVE_COMPILATION_CONFIG__"
PRIORITY_PREFIX = "OPWEAVE_IR_OP_PRIORITY__"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    kind: str
    default: str
    doc: str


VARIABLES = (
    Variable(
        PRIORITY_PREFIX + "<OP>",
        "list",
        "",
        "Providers to prefer for an op, separated by commas; `name!` makes it an error if the "
        "provider cannot be used. `OPWEAVE_IR_OP_PRIORITY__RMS_NORM=triton,opweave_c`.",
    ),
    Variable(
        "OPWEAVE_BATCH_INVARIANT",
        "bool",
        "0",
        "Admit only implementations whose rows do not depend on the rest of the batch.",
    ),
    Variable(
        "OPWEAVE_CACHE_DIR",
        "path",
        "~/.cache/opweave",
        "Where native modules are kept that are built on the fly, or by `opweave native build`.",
    ),
    Variable(
        "OPWEAVE_CHECK_DONATION",
        "bool",
        "0",
        "After `maybe_inplace`, overwrite donated inputs that were not reused with NaN, so that "
        "reading them shows.",
    ),
    Variable(
        COMPILATION_PREFIX + "<KEY>",
        "string",
        "",
        "A key of `CompilationConfig`: `BACKEND`, `MODE` or `CUSTOM_OPS`. "
        "`OPWEAVE_COMPILATION_CONFIG__CUSTOM_OPS=none,+rms_norm`.",
    ),
    Variable(
        "OPWEAVE_CONFIG",
        "path",
        "",
        "The config file, instead of the nearest `opweave.toml` or `pyproject.toml`.",
    ),
    Variable(
        "OPWEAVE_ISA",
        "string",
        "",
        "The instruction set of the C++ kernels: `base`, `avx2`, `avx512` or `avx512bf16`; by "
        "default the best that the processor has.",
    ),
    Variable(
        "OPWEAVE_LOGGING_LEVEL",
        "string",
        "",
        "Show what opweave logs, from this level up, on standard error: `DEBUG`, `INFO`, "
        "`WARNING`, `ERROR` or `CRITICAL`.",
    ),
)


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return the value of a bool variable.

    Raises:
        SettingError: it is neither true nor false.
    """
    value = environ.get(name, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise SettingError(f"{name}={environ[name]!r} is neither true (1) nor false (0).")
    return value in _TRUE


def logging_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the level from which the log is shown, or None.

    Raises:
        SettingError: there is no such level.
    """
    given = environ.get("OPWEAVE_LOGGING_LEVEL", "").strip()
    if given and given.upper() not in LEVELS:
        raise SettingError(
            f"OPWEAVE_LOGGING_LEVEL={given!r} is no level. {did_you_mean(given.upper(), LEVELS)}"
        )
    return given.upper() or None


def priorities(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the priority lists by op, as written."""
    return _below(PRIORITY_PREFIX, environ)


def compilation_config(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what is said of the compilation config, as written; empty counts as unset."""
    return {key: value for key, value in _below(COMPILATION_PREFIX, environ).items() if value}


def in_use(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that are set and mean something to opweave."""
    return {name: environ[name] for name in sorted(environ) if _is_known(name)}


def unknown_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that start with ``OPWEAVE_`` but mean nothing to opweave."""
    return sorted(n for n in environ if n.startswith("OPWEAVE_") and not _is_known(n))


def _below(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(prefix).lower(): value
        for name, value in environ.items()
        if name.startswith(prefix)
    }


def _is_known(name: str) -> bool:
    return name.startswith((COMPILATION_PREFIX, PRIORITY_PREFIX)) or name in {
        v.name for v in VARIABLES
    }
