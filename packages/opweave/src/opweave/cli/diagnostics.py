"""The data that ``opweave doctor`` shows. A part that fails does not hide the others."""

from __future__ import annotations

import platform as python_platform
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from opweave import native, platforms
from opweave.cli.plugin_options import GivenOptions, set_options
from opweave.cli.tools import installed_version, tools
from opweave.config import current_compilation_config, environment, file
from opweave.config.plugin_settings import plugin_settings
from opweave.ir import current_registry
from opweave.ir.description import owner_in_force
from opweave.ir.errors import OpweaveError, SettingWarning
from opweave.platforms import Platform, Resolution, resolution
from opweave.platforms.contract import members
from opweave.platforms.passes import pass_references
from opweave.plugins import (
    PluginRecord,
    PluginWarning,
    hook,
    load_general_plugins,
    plugin_problems,
    plugin_report,
)
from opweave.plugins.errors import PluginsFailedError

_PACKAGES = ("opweave", "torch", "safetensors", "tokenizers", "numpy", "cyclopts", "rich")


class Diagnostics:
    """Loads everything that a run would load, and collects problems.

    Args:
        options: plugin options from the command line.
    """

    def __init__(self, options: GivenOptions = None) -> None:
        self.problems: list[str] = []
        self.found: Resolution | None = None
        with warnings.catch_warnings():
            for category in (PluginWarning, SettingWarning):  # they are among the problems
                warnings.simplefilter("ignore", category)
            plugged = self._step(load_general_plugins)
            if self._step(self._resolve) and plugged:
                self._step(lambda: set_options(options))
                self._step(current_registry().check_settings)
        self._step(current_compilation_config)
        self._step(environment.check_declared)
        self._check_native()
        self.tools = tools()
        self.problems += [each.problem for each in self.tools if each.required and not each.found]
        self.problems += environment.unknown_variables()

    def report(self) -> dict[str, Any]:
        """Return the data of ``opweave doctor``."""
        platform = self._platform()
        plugins = self._plugins()  # after the platform's hooks, which may fail
        facts = {
            "versions": {"python": python_platform.python_version(), **_versions()},
            "platform": platform,
            "plugins": plugins,
            "overrides": self._overrides(plugins),
            "plugin_settings": _settings(),
            "native": asdict(native.status()),
            "tools": [asdict(each) for each in self.tools],
            "config_file": _config_file(),
            "environment": environment.in_use(),
        }
        return {**facts, "problems": list(dict.fromkeys([*plugin_problems(), *self.problems]))}

    def _step(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except PluginsFailedError:
            return False  # each is among plugin_problems()
        except OpweaveError as error:
            self.problems.append(str(error))
            return False
        return True

    def _resolve(self) -> None:
        self.found = resolution()

    def _check_native(self) -> None:
        status = native.status()
        if not status.available:
            self.problems.append(
                f"The native module is missing: {status.reason_missing}. Ops run without it."
            )

    def _platform(self) -> dict[str, Any] | None:
        if self.found is None:
            return None
        platform, owner = self.found.platform, self.found.owner
        return {
            "name": platform.name,
            "device_type": platform.device_type,
            "class": self.found.qualname,
            "owner": None if owner is None else asdict(owner),
            "why": self.found.why,
            "first_asked_by": self.found.trace,
            "candidates": [
                {"name": name, "score": claim.score, "why": claim.why}
                for name, claim, _ in self.found.candidates
            ],
            "supported_dtypes": [str(dtype) for dtype in platform.supported_dtypes],
            "overrides": _overridden(platform),
            **self._device(self.found),
        }

    def _device(self, found: Resolution) -> dict[str, Any]:
        try:
            with hook(found.owner, "doctor"):
                return _facts(found.platform)
        except OpweaveError as error:
            self.problems.append(str(error))
        except Exception as error:  # of a driver; a plugin's are all of the kind above
            name = found.platform.name
            self.problems.append(f"platform {name} cannot describe its device: {error}")
        return {}

    def _plugins(self) -> list[dict[str, Any]]:
        records: list[PluginRecord] = []
        self._step(lambda: records.extend(plugin_report()))
        return [{**asdict(record), "state": str(record.state)} for record in records]

    def _overrides(self, plugins: list[dict[str, Any]]) -> list[dict[str, Any]]:
        registered = [(what, _owner(plugin)) for plugin in plugins for what in plugin["registered"]]
        if self.found is not None and self.found.owner is not None:
            owner = asdict(self.found.owner)
            passes = [f"compiler pass {each.qualname}" for each in self._passes()]
            registered += [(what, owner) for what in passes if (what, owner) not in registered]
        return [
            {
                "kind": kind,
                "name": name,
                "owner": owner,
                "replaced_by": _replacing(kind, name, owner),
            }
            for what, owner in registered
            for kind, _, name in [what.rpartition(" ")]
        ]

    def _passes(self) -> list[Any]:
        found: list[Any] = []
        self._step(lambda: found.extend(pass_references(platforms.current_platform)))
        return [each for each in found if self.found and each.owner == self.found.owner]


def _replacing(kind: str, name: str, owner: dict[str, str]) -> dict[str, str] | None:
    """Return the plugin that replaced a registration of *owner*, if any."""
    registry, now = current_registry(), None
    if kind == "implementation":
        op, _, provider = name.partition(":")
        now = owner_in_force(registry.op(op), provider)
    elif kind == "default of":
        now = registry.settings.default_owner(name)
    return None if now is None or asdict(now) == owner else asdict(now)


def _settings() -> list[dict[str, Any]]:
    return [
        {**each._asdict(), "owner": None if each.owner is None else asdict(each.owner)}
        for each in plugin_settings()
    ]


def _facts(platform: Platform) -> dict[str, Any]:
    capability = platform.get_device_capability()
    return {
        "device_name": platform.get_device_name(),
        "device_capability": None if capability is None else str(capability),
        "capabilities": asdict(platform.capabilities),
        "facts": dict(platform.doctor()),
    }


def _overridden(platform: Platform) -> list[str]:
    """Return the contract's methods that the platform overrides."""
    return [
        name
        for name in members(Platform)
        if callable(getattr(Platform, name, None))
        and getattr(type(platform), name) is not getattr(Platform, name)
    ]


def _owner(plugin: dict[str, Any]) -> dict[str, str]:
    return {
        "plugin": plugin["name"],
        "distribution": plugin["distribution"],
        "version": plugin["version"],
    }


def _versions() -> dict[str, str | None]:
    return {package: installed_version(package) for package in _PACKAGES}


def _config_file() -> str | None:
    try:
        path = file.find().path
    except OpweaveError:
        return None  # among the problems
    return str(path) if path else None
