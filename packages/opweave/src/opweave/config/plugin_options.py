"""Settings of plugins: command-line options and environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from opweave.config.environment import PluginValue, declared
from opweave.config.values import OpenRegistry, check_kind, read
from opweave.ir.errors import SettingError, did_you_mean
from opweave.registration import Owner

# Command-line options of plugins: ``--plugin.<plugin>.<key>=<value>``.


T = TypeVar("T", bool, int, float, str)

PREFIX = "--plugin."


options: OpenRegistry[PluginValue[Any]] = OpenRegistry("plugin option")
_given: dict[str, Any] = {}


class PluginOptions:
    """The options of one plugin.

    Args:
        plugin: its name, the prefix of the keys on the command line.

    Example::

        class AcmePlatform(Platform):
            def extend_cli(self, options):
                options.add("queue_depth", int, 4, "Kernels in flight.")

        PluginOptions("acme")["queue_depth"]  # 4, or the value of --plugin.acme.queue-depth
    """

    def __init__(self, plugin: str) -> None:
        self.plugin = plugin

    def add(self, key: str, kind: type[T], default: T, help: str) -> None:
        """Declare an option.

        Args:
            key: an identifier; the user may write ``-`` for ``_``.
            kind: ``bool``, ``int``, ``float`` or ``str``.
            default: the value if the user does not set it.
            help: description.

        Raises:
            SettingError: (a ValueError) *key* is not an identifier, or *default* is not of type
                *kind*.
            DuplicateNameError: (a ValueError) the plugin has an option of that name.
        """
        if not key.isidentifier():
            raise SettingError(f"plugin option {key!r} must be an identifier, as 'queue_depth'.")
        check_kind(f"{PREFIX}{self.plugin}.{key}", kind, default)
        options.add(f"{self.plugin}.{key}", PluginValue(kind, default, help))

    def __getitem__(self, key: str) -> Any:
        """Return the user's value, or the default.

        Raises:
            UnknownNameError: (a LookupError) the plugin does not declare the option.
        """
        name = f"{self.plugin}.{key}"
        return _given.get(name, options[name].default)


def apply_plugin_options(values: Mapping[str, object], origin: str = PREFIX) -> None:
    """Replace all values set by the user.

    Args:
        values: by ``plugin.key``, where ``-`` and ``_`` are equivalent: text to parse as the
            option's type, or values of that type.
        origin: prefix of the names in messages.

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
    """Set typed values by ``plugin.key``, from :func:`given_plugin_options` of another process."""
    _given.clear()
    _given.update(values)


def given_plugin_options() -> dict[str, Any]:
    """Return the values set by the user, by ``plugin.key``, for child processes."""
    return dict(_given)


# All settings of plugins: command-line options and environment variables.


class PluginSetting(NamedTuple):
    """An option or variable as the user writes it; ``given`` is None if it has its default."""

    name: str
    kind: str
    default: Any
    given: Any
    help: str
    owner: Owner | None


def plugin_settings(environ: Mapping[str, str] = os.environ) -> Iterator[PluginSetting]:
    """Yield every option, then every variable, that plugins have declared so far."""
    flags = (
        (PREFIX + name.replace("_", "-"), entry, _given.get(name))
        for name, entry in options.entries.items()
    )
    variables = ((name, entry, environ.get(name)) for name, entry in declared.entries.items())
    for name, entry, given in chain(flags, variables):
        kind, default, doc = entry.value.kind.__name__, entry.value.default, entry.value.doc
        yield PluginSetting(name, kind, default, given, doc, entry.owner)
