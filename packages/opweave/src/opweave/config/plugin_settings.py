"""All settings of plugins: command-line options and environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from opweave.base.owner import Owner
from opweave.config.environment import declared
from opweave.config.plugin_options import PREFIX, given_plugin_options, options


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
    given = given_plugin_options()
    for name, entry in options.entries.items():
        flag, option = PREFIX + name.replace("_", "-"), entry.value
        kind, value = option.kind.__name__, given.get(name)
        yield PluginSetting(flag, kind, option.default, value, option.help, entry.owner)
    for name, declaration in declared.entries.items():
        variable, value = declaration.value, environ.get(name)
        kind = variable.kind.__name__
        yield PluginSetting(name, kind, variable.default, value, variable.doc, declaration.owner)
