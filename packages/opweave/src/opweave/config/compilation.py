"""The configuration of compilation and of the enabled custom ops, and the current one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any, Self, cast

from opweave.config import environment, sources
from opweave.config.values import Config, Origin, parsed, read_object
from opweave.ir.errors import SettingError, did_you_mean
from opweave.registration import bound

# The list of enabled ``CustomOp`` ops: ``all``, ``none``, ``+op`` and ``-op``.


_BASES = ("all", "none")


class CustomOps(tuple[str, ...]):
    """A complete list of enabled ops, with ``all`` or ``none`` exactly once.

    Attributes:
        given: the user's list, without the appended default.

    >>> CustomOps.parse("+rms_norm,-silu_and_mul", default="all")
    ('+rms_norm', '-silu_and_mul', 'all')
    """

    given: tuple[str, ...]

    @classmethod
    def parse(cls, value: object, *, default: str) -> Self:
        """Parse a list, a comma-separated string, or a JSON list.

        Items of a list may be comma-separated too. In op names, ``-`` and ``_`` are equivalent.

        Raises:
            SettingError: (a ValueError) an item is not ``all``, ``none``, ``+op`` or ``-op``;
                ``all`` and ``none`` occur more than once; or an op is both enabled and disabled.
        """
        given = value.given if isinstance(value, CustomOps) else tuple(_tokens(value))
        bases = [token for token in given if token in _BASES]
        if len(bases) > 1:
            raise SettingError(
                f"custom_ops {list(given)!r} contains {' and '.join(map(repr, bases))}. Give 'all' "
                "or 'none' once."
            )
        both = sorted(_named(given, "+") & _named(given, "-"))
        if both:
            raise SettingError(
                f"custom_ops {list(given)!r} both enables and disables {', '.join(both)}. Keep "
                f"'+{both[0]}' or '-{both[0]}'."
            )
        ops = cls(given if bases else (*given, default))
        ops.given = given
        return ops


def _tokens(value: object) -> Iterable[str]:
    if isinstance(value, str):
        form = 'JSON list, such as ["none", "+rms_norm"]'
        items = parsed("custom_ops", value, form) if value.strip().startswith("[") else [value]
    elif isinstance(value, Iterable):
        items = list(value)
    else:
        items = [value]
    for item in items:
        if not isinstance(item, str):
            raise SettingError(
                f"custom_ops {value!r} should be a list of strings, such as ['none', '+rms_norm']."
            )
        if item.strip():
            yield from map(_token, item.split(","))


def _token(written: str) -> str:
    token = written.strip()
    token = token[:1] + token[1:].replace("-", "_")
    if token in _BASES or (token[:1] in ("+", "-") and token[1:].isidentifier()):
        return token
    raise SettingError(f"custom_ops: {written!r} must be 'all', 'none', '+op' or '-op'.")


def _named(tokens: Iterable[str], sign: str) -> frozenset[str]:
    return frozenset(token[1:] for token in tokens if token.startswith(sign))


# The configuration of compilation and of the enabled custom ops.


class CompilationMode(IntEnum):
    """The way in which a model is compiled."""

    NONE = 0
    """Do not compile."""
    STOCK_TORCH_COMPILE = 1
    """``torch.compile`` without changes."""
    DYNAMO_TRACE_ONCE = 2
    """``torch.compile`` of the whole model in one graph."""
    OPWEAVE_COMPILE = 3
    """One graph, with opweave's passes."""
    VLLM_COMPILE = 3
    """vLLM's name for ``OPWEAVE_COMPILE``."""


@dataclass(frozen=True)
class CompilationConfig(Config):
    """How to compile, and which ``CustomOp`` layers run their platform's method.

    Args:
        backend: the backend of ``torch.compile``.
        mode: a :class:`CompilationMode`, or its number or name.
        custom_ops: ``all`` or ``none``, with exceptions ``+op`` and ``-op``; a list or a
            comma-separated string. The default for other ops is ``none`` if Inductor compiles,
            because it can fuse their PyTorch code, else ``all``.
        options: the backend's options, as for ``torch.compile``; a mapping or a JSON object.
            opweave's passes take those of :class:`opweave.compile.CompileOptions`, such as
            ``{"sequence_parallelism": False}``.
        cudagraph_capture_sizes: the numbers of sequences for which decode steps are recorded as
            graphs, on devices that record them; a batch is padded to the next size. Integers, or
            their comma-separated text. None: 1, 2, 4 and every multiple of 8 up to 256. Empty: no
            graphs.

    Attributes:
        enabled_custom_ops: number of instances of each op created enabled under this config.
        disabled_custom_ops: number of instances created disabled.

    Raises:
        SettingError: (a ValueError) a value is malformed or contradictory.

    Examples:
        >>> CompilationConfig(mode=3, custom_ops="+rms_norm").custom_ops
        ('+rms_norm', 'none')
    """

    backend: str = "inductor"
    mode: CompilationMode | int | str = CompilationMode.NONE
    custom_ops: str | Iterable[str] = ()
    options: Mapping[str, Any] | str = field(default_factory=dict)
    cudagraph_capture_sizes: Iterable[int] | str | None = None
    enabled_custom_ops: Counter[str] = field(
        default_factory=Counter, init=False, compare=False, repr=False
    )
    disabled_custom_ops: Counter[str] = field(
        default_factory=Counter, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str) or not self.backend:
            raise SettingError(f"backend={self.backend!r} should name a backend of torch.compile.")
        mode = _mode(self.mode)
        default = "none" if self.backend == "inductor" and mode != CompilationMode.NONE else "all"
        object.__setattr__(self, "mode", mode)
        object.__setattr__(self, "custom_ops", CustomOps.parse(self.custom_ops, default=default))
        object.__setattr__(self, "options", read_object("options", self.options))
        object.__setattr__(self, "cudagraph_capture_sizes", _sizes(self.cudagraph_capture_sizes))
        super().__post_init__()  # records the typed values

    @property
    def uses_passes(self) -> bool:
        """Whether opweave's passes run: ``inductor`` in the last mode, or backend ``opweave``."""
        in_inductor = self.mode == CompilationMode.OPWEAVE_COMPILE and self.backend == "inductor"
        return self.compiles and (in_inductor or self.backend == "opweave")

    @property
    def backend_options(self) -> Mapping[str, Any]:
        """``options`` as a mapping."""
        return cast("Mapping[str, Any]", self.options)

    @property
    def decode_graph_sizes(self) -> tuple[int, ...] | None:
        """``cudagraph_capture_sizes`` as integers; None for the default."""
        return cast("tuple[int, ...] | None", self.cudagraph_capture_sizes)

    @property
    def compiles(self) -> bool:
        """Whether models are compiled: False in mode ``NONE`` and with backend ``eager``."""
        return self.mode != CompilationMode.NONE and self.backend != "eager"

    @property
    def custom_ops_default_on(self) -> bool:
        """Whether ops are enabled that are not in ``custom_ops``."""
        return "all" in self._ops

    @property
    def named_custom_ops(self) -> frozenset[str]:
        """The ops in ``custom_ops``."""
        return _named(self._ops, "+") | _named(self._ops, "-")

    def enables_custom_op(self, name: str | None) -> bool:
        """Whether the op is enabled; *name* is its registered name, if it has one.

        >>> config = CompilationConfig(custom_ops="all,-silu_and_mul")
        >>> config.enables_custom_op("silu_and_mul"), config.enables_custom_op("relu2")
        (False, True)
        """
        enabled = self.custom_ops_default_on or f"+{name}" in self._ops
        return enabled and f"-{name}" not in self._ops

    def count_custom_op(self, name: str, *, enabled: bool) -> None:
        """Count an instance of an op that was created under this config."""
        (self.enabled_custom_ops if enabled else self.disabled_custom_ops)[name] += 1

    def updated(self, values: Mapping[str, object], origin: str) -> CompilationConfig:
        """Return a copy with the *values* of a source, with empty counters.

        Args:
            values: values by key; ``-`` and ``_`` are equivalent.
            origin: description of the source.

        Raises:
            SettingError: a key is unknown or a value malformed; the message names *origin*.
        """
        known = self.names()
        normalized = {str(key).replace("-", "_"): value for key, value in values.items()}
        for key in normalized:
            if key not in known:
                raise SettingError(f"{origin}: unknown key {key!r}. {did_you_mean(key, known)}")
        try:
            return self.with_values({k: Origin(origin, v) for k, v in normalized.items()})
        except SettingError as error:
            raise SettingError(f"{origin}: {error}") from error

    def _is_default(self, name: str, value: object) -> bool:
        if name == "custom_ops":  # its default depends on other values
            return not self._ops.given
        return super()._is_default(name, value)

    @property
    def _ops(self) -> CustomOps:
        return cast("CustomOps", self.custom_ops)


def _sizes(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    items: object = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.strip().strip("[]").split(",") if part.strip()]
        items = [int(part) if part.isdecimal() else part for part in parts]
    if isinstance(items, Iterable):
        sizes = tuple(items)
        if all(type(size) is int and size > 0 for size in sizes):
            return sizes
    raise SettingError(
        f"cudagraph_capture_sizes={value!r} must be positive integers, such as [1, 2, 4, 8], or "
        "empty for no graphs."
    )


def _mode(value: object) -> CompilationMode:
    mode = value
    if isinstance(value, str):
        text = value.strip()
        name = text.upper().replace("-", "_")
        mode = CompilationMode.__members__.get(name, int(text) if text.isdecimal() else None)
    if isinstance(mode, int) and not isinstance(mode, bool) and mode in list(CompilationMode):
        return CompilationMode(mode)
    possible = ", ".join(f"{mode.value} ({mode.name})" for mode in CompilationMode)
    raise SettingError(f"mode={value!r} should be one of {possible}.")


# The current compilation config: that of the enclosing scope, or of the process.


_scoped: ContextVar[CompilationConfig | None] = ContextVar(
    "opweave_compilation_config", default=None
)
_command_line: dict[str, object] = {}


def current_compilation_config() -> CompilationConfig:
    """Return the config of the innermost :func:`compilation_config` block.

    Outside of a block, return the config of the process: from the command line, the environment
    and the config file, strongest first, and the defaults.

    Raises:
        SettingError: one of them is malformed.
    """
    return _scoped.get() or _of_process()


@contextmanager
def compilation_config(config: CompilationConfig) -> Iterator[CompilationConfig]:
    """Make *config* the current one inside the block, in this thread or asyncio task only.

    ``with compilation_config(CompilationConfig(custom_ops=["none", "+rms_norm"])): ...``
    """
    with bound(_scoped, config):
        yield config


def apply_command_line_config(values: Mapping[str, object]) -> None:
    """Set the values of ``--compilation-config.<key>=...`` for the process.

    Raises:
        SettingError: a key is unknown or a value malformed, here or in a weaker source.
    """
    _command_line.clear()
    _command_line.update(values)
    _of_process.cache_clear()
    _of_process()


@cache
def _of_process() -> CompilationConfig:
    config, file = CompilationConfig(), sources.find()
    config = config.updated(file.compilation_config, f"{file.path} compilation_config")
    for key, value in environment.compilation_config().items():
        origin = f"environment {environment.COMPILATION_PREFIX}{key.upper()}"
        config = config.updated({key: value}, origin)
    for key, option in _command_line.items():
        config = config.updated({key: option}, f"--compilation-config.{key}")
    return config
