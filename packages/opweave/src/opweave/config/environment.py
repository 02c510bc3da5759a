"""The settings of opweave: environment variables, and the keys of the config file.

The docs page is generated from the table. Settings are read once, at the first use of an op.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opweave.config.values import FALSE, TRUE, OpenRegistry, check_kind, read
from opweave.ir.errors import SettingError, did_you_mean

T = TypeVar("T", bool, int, float, str)

COMPILATION_PREFIX = "OPWEAVE_COMPILATION_CONFIG__"
PRIORITY_PREFIX = "OPWEAVE_IR_OP_PRIORITY__"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of opweave.

    Attributes:
        name: its name; one that ends in ``__<...>`` stands for a variable per key.
        doc: its meaning.
        kind: its type in the documentation.
        default: its default.
        in_file: whether the config file has it too: ``OPWEAVE_CHECK_DONATION`` as the key
            ``check_donation``, one per key as a table.
    """

    name: str
    doc: str
    kind: str = "string"
    default: str = ""
    in_file: bool = False

    @property
    def file_key(self) -> str:
        """The key of the config file, if it has one."""
        key = self.name.removeprefix("OPWEAVE_").partition("__")[0].lower()
        return key if self.in_file else ""

    @property
    def file_kind(self) -> str:
        """The type of the key of the config file: ``"table"``, ``"bool"`` or ``"string"``."""
        return "table" if "__<" in self.name else {"path": "string"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class PluginValue(Generic[T]):
    """The type, default and description of a plugin's variable or option."""

    kind: type[T]
    default: T
    doc: str


declared: OpenRegistry[PluginValue[Any]] = OpenRegistry("environment variable")
"""The variables of plugins, by name."""


API_KEY = "OPWEAVE_API_KEY"
TUNING_FILE = "OPWEAVE_TUNING_FILE"

# fmt: off
VARIABLES = (
    Variable(
        API_KEY,
        "The API keys of `opweave serve`, separated by commas, unless `--api-key` is given.",
        kind="list",
    ),
    Variable(
        PRIORITY_PREFIX + "<OP>",
        "Providers to prefer for an op, separated by commas; `name!` makes it an error if the "
        "provider cannot be used. `OPWEAVE_IR_OP_PRIORITY__RMS_NORM=triton,opweave_c`.",
        kind="list", in_file=True,
    ),
    Variable(
        "OPWEAVE_BATCH_INVARIANT",
        "Use only implementations with the trait `batch_invariant`.",
        kind="bool", default="0", in_file=True,
    ),
    Variable(
        "OPWEAVE_CACHE_DIR",
        "The folder for native modules that are built at run time or by `opweave native build`.",
        kind="path", default="~/.cache/opweave",
    ),
    Variable(
        "OPWEAVE_CHECK_DONATION",
        "After `maybe_inplace`, overwrite donated inputs that were not reused with NaN, to find "
        "code that reads them.",
        kind="bool", default="0", in_file=True,
    ),
    Variable(
        COMPILATION_PREFIX + "<KEY>",
        "A key of `CompilationConfig`: `BACKEND`, `MODE`, `CUSTOM_OPS` or, as a JSON object, "
        "`OPTIONS`. `OPWEAVE_COMPILATION_CONFIG__CUSTOM_OPS=none,+rms_norm`.",
        in_file=True,
    ),
    Variable(
        "OPWEAVE_CONFIG",
        "The config file, instead of the nearest `opweave.toml` or `pyproject.toml`.",
        kind="path",
    ),
    Variable(
        "OPWEAVE_ISA",
        "The instruction set of the C++ kernels: `base`, `avx2`, `avx512`, `avx512bf16`, `zen4` "
        "or `amx`; by default the best for this CPU.",
    ),
    Variable(
        "OPWEAVE_LOGGING_LEVEL",
        "Write log records from this level up to standard error: `DEBUG`, `INFO`, `WARNING`, "
        "`ERROR` or `CRITICAL`.",
    ),
    Variable(
        "OPWEAVE_NATIVE_TORCH_INTERNALS",
        "Whether C++ operators may read tensors through parts of torch that it does not document. "
        "They are tested at load and not used if a test fails; with `0`, they are never used, and "
        "calls take longer.",
        kind="bool", default="1",
    ),
    Variable(
        "OPWEAVE_PLATFORM",
        "The platform to use; other platform plugins are not imported.",
    ),
    Variable(
        "OPWEAVE_PLATFORM_RESOLUTION",
        "The platform of the parent process as JSON. Child processes use the same one or refuse "
        "to run.",
    ),
    Variable(
        "OPWEAVE_PLUGINS",
        "The plugins to load, separated by commas: `a,b` for only these, `-a` for all others. By "
        "default all are loaded; an empty value loads no plugin.",
        kind="list",
    ),
    Variable(
        "OPWEAVE_PLUGINS_STRICT",
        "Whether a failing plugin is an error. With `0`, opweave logs a warning and continues.",
        kind="bool", default="1",
    ),
    Variable(
        TUNING_FILE,
        "A file that `opweave tune` has written; its measurements choose kernels by the number of "
        "tokens. An empty value disables the file that a config file names.",
        kind="path", in_file=True,
    ),
)
# fmt: on


def declare_variable(name: str, kind: type[T], default: T, doc: str) -> None:
    """Declare an environment variable of a plugin, for ``opweave doctor`` and type checks.

    Args:
        name: the name, such as ``"ACME_QUEUE_DEPTH"``.
        kind: ``bool``, ``int``, ``float`` or ``str``.
        default: the value if it is not set.
        doc: description.

    Raises:
        SettingError: (a ValueError) *name* is malformed or used by opweave, or *default* is not of
            type *kind*.
        DuplicateNameError: (a ValueError) a plugin has already declared it.
    """
    if not name.isidentifier() or not name.isupper():
        raise SettingError(
            f"environment variable {name!r} must consist of capitals, digits and underscores, such "
            "as 'ACME_QUEUE_DEPTH'."
        )
    if _is_builtin(name):
        raise SettingError(f"environment variable {name} is used by opweave. Choose another name.")
    check_kind(name, kind, default)
    declared.add(name, PluginValue(kind, default, doc))


def declared_value(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Return the current value of a declared variable as its type, or its default.

    Raises:
        UnknownNameError: (a LookupError) it is not declared.
        SettingError: its value is not of its type.
    """
    variable = declared[name]
    return read(name, variable.kind, environ[name]) if name in environ else variable.default


def check_declared(environ: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`SettingError` if the value of a declared variable is not of its type."""
    for name in declared:
        declared_value(name, environ)


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return the value of a bool variable; raise :class:`SettingError` if it is malformed."""
    value = environ.get(name, "").strip().lower()
    if value not in TRUE | FALSE:
        raise SettingError(f"{name}={environ[name]!r} must be true (1) or false (0).")
    return value in TRUE


def logging_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of ``OPWEAVE_LOGGING_LEVEL``, or None.

    Raises:
        SettingError: it is not a log level.
    """
    value = environ.get("OPWEAVE_LOGGING_LEVEL", "").strip()
    if value and value.upper() not in LEVELS:
        raise SettingError(
            f"OPWEAVE_LOGGING_LEVEL={value!r} is not a valid log level. "
            f"{did_you_mean(value.upper(), LEVELS)}"
        )
    return value.upper() or None


def api_keys(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the API keys of ``opweave serve``."""
    return [key.strip() for key in environ.get(API_KEY, "").split(",") if key.strip()]


def priorities(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the priority lists by op, unparsed."""
    return _below(PRIORITY_PREFIX, environ)


def compilation_config(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the values for the compilation config by key, unparsed; empty counts as unset."""
    return {key: value for key, value in _below(COMPILATION_PREFIX, environ).items() if value}


def in_use(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the set variables that opweave knows, with secrets masked."""
    names = filter(_is_known, sorted(environ))
    return {name: "***" if name == API_KEY else environ[name] for name in names}


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a message for each unknown variable that starts with ``OPWEAVE_``."""
    variables = [variable.name for variable in VARIABLES]
    return [
        f"{name} is set, but is not a variable of opweave. {did_you_mean(name, variables)}"
        for name in sorted(environ)
        if name.startswith("OPWEAVE_") and not _is_known(name)
    ]


def _below(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(prefix).lower(): value
        for name, value in environ.items()
        if name.startswith(prefix)
    }


def _is_known(name: str) -> bool:
    return name in declared or _is_builtin(name)


def _is_builtin(name: str) -> bool:
    has_prefix = name.startswith((COMPILATION_PREFIX, PRIORITY_PREFIX))
    return has_prefix or any(name == variable.name for variable in VARIABLES)
