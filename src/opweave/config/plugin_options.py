"""Options that plugins bring: ``--plugin.<plugin>.<key>=<value>``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opweave.config.open_registry import OpenRegistry
from opweave.config.typed import check_kind, read
from opweave.ir.errors import SettingError, did_you_mean

T = TypeVar("T", bool, int, float, str)

PREFIX = "--plugin."


@dataclass(frozen=True)
class PluginOption(Generic[T]):
    """One option: its type, what it is if nobody says, and its help text."""

    kind: type[T]
    default: T
    help: str


options: OpenRegistry[PluginOption[Any]] = OpenRegistry("plugin option")
_given: dict[str, Any] = {}


class PluginOptions:
    """The options of one plugin.

    Args:
        plugin: its name, which the user writes before the key.

    Example::

        class AcmePlatform(Platform):
            def extend_cli(self, options):
                options.add("queue_depth", int, 4, "Kernels in flight.")

        PluginOptions("acme")["queue_depth"]  # 4, or what --plugin.acme.queue-depth=8 said
    """

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin

    def add(self, key: str, kind: type[T], default: T, help: str) -> None:
        """Declare an option.

        Args:
            key: an identifier; the user may write ``-`` for ``_``.
            kind: ``bool``, ``int``, ``float`` or ``str``.

        Raises:
            SettingError: (a ValueError) *key* is no identifier, or *default* is of another type.
            DuplicateNameError: (a ValueError) the plugin has an option of that name.
        """
        if not key.isidentifier():
            raise SettingError(f"plugin option {key!r} should be an identifier, as 'queue_depth'.")
        check_kind(f"{PREFIX}{self.plugin}.{key}", kind, default)
        options.add(f"{self.plugin}.{key}", PluginOption(kind, default, help))

    def __getitem__(self, key: str) -> Any:
        """Return the value: what the user gave, or the default.

        Raises:
            UnknownNameError: (a LookupError) the plugin declares no such option.
        """
        name = f"{self.plugin}.{key}"
        return _given.get(name, options[name].default)


def apply_plugin_options(values: Mapping[str, object], origin: str = PREFIX) -> None:
    """Set what the user gave, by ``plugin.key``, with ``-`` and ``_`` alike; all at once.

    Args:
        values: texts, which are read as the option's type, or values of that type.
        origin: what stands before the name in messages.

    Raises:
        SettingError: (a ValueError) an option is unknown, or a value malformed.
    """
    typed = {}
    for written, value in values.items():
        name = written.replace("-", "_")
        if name not in options:
            raise SettingError(
                f"{origin}{written}: no plugin has this option. {did_you_mean(name, options)}"
            )
        typed[name] = read(f"{origin}{written}", options[name].kind, value)
    set_plugin_options(typed)


def set_plugin_options(values: Mapping[str, Any]) -> None:
    """Set typed values by ``plugin.key``: those of :func:`given_plugin_options` elsewhere."""
    _given.clear()
    _given.update(values)


def given_plugin_options() -> dict[str, Any]:
    """Return what the user gave, by ``plugin.key``; for the processes that this one starts."""
    return dict(_given)
