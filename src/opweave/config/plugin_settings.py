"""What plugins can be told, in one list: options of the command line, environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from opweave.base.owner import Owner
from opweave.config.environment import declared
from opweave.config.plugin_options import PREFIX, given_plugin_options, options


class PluginSetting(NamedTuple):
    """One option or variable, as the user writes it; ``given`` is None where it has its default."""

    name: str
    kind: str
    default: Any
    given: Any
    help: str
    owner: Owner | None


def plugin_settings(environ: Mapping[str, str] = os.environ) -> Iterator[PluginSetting]:
    """Yield every option, then every variable, that plugins have declared so far."""
    said = given_plugin_options()
    for name, option in options.entries.items():
        written, of = PREFIX + name.replace("_", "-"), option.value
        yield PluginSetting(
            written, of.kind.__name__, of.default, said.get(name), of.help, option.owner
        )
    for name, variable in declared.entries.items():
        what = variable.value
        yield PluginSetting(
            name, what.kind.__name__, what.default, environ.get(name), what.doc, variable.owner
        )
