"""Creates a plugin package that passes conformance."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from opweave.ir.schema import OWN_PROVIDERS, RESERVED_PROVIDERS
from opweave.native.scaffold import write_package
from opweave.plugins.entry import BUILTIN_PLATFORMS, PLATFORM_PLUGINS, PluginScaffoldError

_TEMPLATES = Path(__file__).parent / "templates"
_ENTRY_POINT = f"""
[project.entry-points."{PLATFORM_PLUGINS}"]
{{name}} = "{{name}}.claim:claim"
"""
_PROVIDERS = {*RESERVED_PROVIDERS, *OWN_PROVIDERS}
_TAKEN = frozenset({*BUILTIN_PLATFORMS, *_PROVIDERS, "opweave", "tests"})


def new(name: str, parent: Path, *, platform: bool = False) -> list[Path]:
    """Create the plugin package *name* in a new folder in *parent*; return its files.

    It has a kernel, a replacement layer, and tests with the conformance kit.

    Args:
        platform: whether to add a platform.

    Raises:
        PluginScaffoldError: the name is not valid, or the folder exists or cannot be written.
    """
    _check_name(name)
    folders = [_TEMPLATES / "general", *([_TEMPLATES / "platform"] if platform else [])]
    values = {
        "class": "".join(part.capitalize() for part in name.split("_")),
        "platform_plugins": _ENTRY_POINT.format(name=name) if platform else "",
    }
    return write_package(name, parent, folders, PluginScaffoldError, values)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginScaffoldError(
            f"{name!r} is not a name for a plugin; use lowercase letters, digits and underscores, "
            "starting with a letter, and no Python keyword. It becomes that of the package, of the "
            "provider of its kernels, and of the platform."
        )
    check_free(name)


def check_free(name: str) -> None:
    """Check that *name* is not taken in opweave or Python.

    Raises:
        PluginScaffoldError: it is the name of a platform, a provider or a Python module.
    """
    if name in _TAKEN or name in sys.stdlib_module_names:
        raise PluginScaffoldError(f"The name {name!r} is taken; choose another one.")
