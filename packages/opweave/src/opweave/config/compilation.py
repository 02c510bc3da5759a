"""The configuration of compilation and of the enabled custom ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from opweave.config.custom_ops import CustomOps
from opweave.config.json_text import read_object
from opweave.config.origin import Config, Origin
from opweave.ir.errors import SettingError, did_you_mean


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

    @property
    def uses_passes(self) -> bool:
        """Whether opweave's passes run: ``inductor`` in the last mode, or backend ``opweave``."""
        own = self.mode == CompilationMode.OPWEAVE_COMPILE and self.backend == "inductor"
        return self.compiles and (own or self.backend == "opweave")

    @property
    def backend_options(self) -> Mapping[str, Any]:
        """``options`` as a mapping."""
        assert isinstance(self.options, Mapping)
        return self.options

    @property
    def decode_graph_sizes(self) -> tuple[int, ...] | None:
        """``cudagraph_capture_sizes`` as integers; None for the default."""
        sizes = self.cudagraph_capture_sizes
        assert sizes is None or isinstance(sizes, tuple)
        return sizes

    @property
    def compiles(self) -> bool:
        """Whether models are compiled: False in mode ``NONE`` and with backend ``eager``."""
        return self.mode != CompilationMode.NONE and self.backend != "eager"

    @property
    def custom_ops_default_on(self) -> bool:
        """Whether ops are enabled that are not in ``custom_ops``."""
        return self._ops.default_on

    @property
    def named_custom_ops(self) -> frozenset[str]:
        """The ops in ``custom_ops``."""
        return self._ops.named

    def enables_custom_op(self, name: str | None) -> bool:
        """Whether the op is enabled; *name* is its registered name, if it has one."""
        return self._ops.enables(name)

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
        assert isinstance(self.custom_ops, CustomOps)
        return self.custom_ops


def _sizes(given: object) -> tuple[int, ...] | None:
    if given is None:
        return None
    found: object = given
    if isinstance(given, str):
        parts = [part.strip() for part in given.strip().strip("[]").split(",") if part.strip()]
        found = [int(part) if part.isdecimal() else part for part in parts]
    if isinstance(found, Iterable):
        sizes = tuple(found)
        if all(type(size) is int and size > 0 for size in sizes):
            return sizes
    raise SettingError(
        f"cudagraph_capture_sizes={given!r} must be positive integers, such as [1, 2, 4, 8], or "
        "empty for no graphs."
    )


def _mode(given: object) -> CompilationMode:
    found = given
    if isinstance(given, str):
        text = given.strip()
        name = text.upper().replace("-", "_")
        found = CompilationMode.__members__.get(name, int(text) if text.isdecimal() else None)
    if isinstance(found, int) and not isinstance(found, bool) and found in list(CompilationMode):
        return CompilationMode(found)
    possible = ", ".join(f"{mode.value} ({mode.name})" for mode in CompilationMode)
    raise SettingError(f"mode={given!r} should be one of {possible}.")
