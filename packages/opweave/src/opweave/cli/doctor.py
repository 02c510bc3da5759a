"""``opweave doctor``: show the installation and its problems."""

from __future__ import annotations

import platform as python_platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import requires
from typing import Any

from rich.markup import escape
from rich.table import Table

from opweave import native, platforms
from opweave.cli.options import Flag, GivenOptions, PluginOption, set_options
from opweave.cli.output import PlainTable, out, print_json
from opweave.config import current_compilation_config, environment, sources
from opweave.config.plugin_options import plugin_settings
from opweave.ir import current_registry
from opweave.ir.errors import OpweaveError, SettingWarning
from opweave.ir.explain import owner_in_force
from opweave.native import NativeBuildError, toolchain
from opweave.packages import installed_version
from opweave.platforms import Platform, Resolution, resolution
from opweave.platforms.base import members
from opweave.platforms.resolution import PassReference, pass_references
from opweave.plugins import (
    PluginRecord,
    PluginWarning,
    hook,
    load_general_plugins,
    plugin_problems,
    plugin_report,
)
from opweave.plugins.entry import PluginsFailedError
from opweave.registration import Owner

# Optional tools and packages that ``opweave doctor`` looks for.


_COMPANIONS = {
    "opweave-engine": "opweave generate, chat, explain and serve",
    "opweave-vllm": "opweave migrate, and opweave's kernels in vLLM",
}
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Tool:
    """An optional dependency.

    Attributes:
        name: name for the user.
        found: its version, or None if it is missing.
        needed_for: features that need it.
        fix: how to install it.
        required: whether doctor reports a problem if it is missing.
    """

    name: str
    found: str | None
    needed_for: str
    fix: str
    required: bool = False

    @property
    def problem(self) -> str:
        return f"{self.name} is missing: {self.needed_for} will not work. {self.fix}"


def tools() -> list[Tool]:
    """Return the C++ compiler, Python's headers, Triton, and the packages that extend opweave."""
    needed_for = "torch.compile on the CPU, opweave native build"
    return [
        Tool(
            "C++ compiler",
            _built_with(lambda: toolchain.cxx().version.partition("\n")[0]),
            needed_for,
            "Install g++ or clang++, or set CXX.",
            required=True,
        ),
        Tool(
            "Python headers",
            _built_with(lambda: str(toolchain.python_include())),
            needed_for,
            "Install Python.h (Debian: python3-dev).",
        ),
        Tool("Triton", installed_version("triton"), "the provider triton", "pip install triton"),
        *(_companion(package, use) for package, use in _COMPANIONS.items()),
    ]


def _built_with(find: Callable[[], str]) -> str | None:
    try:
        return find()
    except NativeBuildError:
        return None


def _companion(package: str, use: str) -> Tool:
    missing = [name for name in _required(package) if installed_version(name) is None]
    return Tool(
        f"{package}{' (' + ', '.join(missing) + ')' if missing else ''}",
        None if missing else installed_version(package),
        use,
        f"pip install {package}",
    )


def _required(package: str) -> Iterator[str]:
    if installed_version(package) is None:
        return
    for requirement in requires(package) or ():
        if "extra ==" not in requirement and (name := _NAME.match(requirement)):
            yield name[0]


# The data that ``opweave doctor`` shows. A part that fails does not hide the others.


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
        status = native.status()
        if not status.available:
            self.problems.append(
                f"The native module is missing: {status.reason_missing}. Ops run without it."
            )
        self.tools = tools()
        self.problems += [tool.problem for tool in self.tools if tool.required and not tool.found]
        self.problems += environment.unknown_variables()

    def report(self) -> dict[str, Any]:
        """Return the data of ``opweave doctor``."""
        platform = self._platform()
        plugins = self._plugins()  # after the platform's hooks, which may fail
        facts = {
            "versions": {
                "python": python_platform.python_version(),
                **{package: installed_version(package) for package in _PACKAGES},
            },
            "platform": platform,
            "plugins": plugins,
            "overrides": self._overrides(plugins),
            "plugin_settings": _settings(),
            "native": asdict(native.status()),
            "tools": [asdict(tool) for tool in self.tools],
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

    def _device(self, resolved: Resolution) -> dict[str, Any]:
        try:
            with hook(resolved.owner, "doctor"):
                return _facts(resolved.platform)
        except OpweaveError as error:
            self.problems.append(str(error))
        except Exception as error:  # of a driver; a plugin's are all of the kind above
            name = resolved.platform.name
            self.problems.append(f"platform {name} cannot describe its device: {error}")
        return {}

    def _plugins(self) -> list[dict[str, Any]]:
        records: list[PluginRecord] = []
        self._step(lambda: records.extend(plugin_report()))
        return [{**asdict(record), "state": str(record.state)} for record in records]

    def _overrides(self, plugins: list[dict[str, Any]]) -> list[dict[str, Any]]:
        labels = [(label, _owner(plugin)) for plugin in plugins for label in plugin["registered"]]
        if self.found is not None and self.found.owner is not None:
            passes: list[PassReference] = []
            self._step(lambda: passes.extend(pass_references(platforms.current_platform)))
            names = [f"compiler pass {p.qualname}" for p in passes if p.owner == self.found.owner]
            owner = asdict(self.found.owner)
            labels += [(name, owner) for name in names if (name, owner) not in labels]
        return [
            {
                "kind": kind,
                "name": name,
                "owner": owner,
                "replaced_by": _replacing(kind, name, owner),
            }
            for label, owner in labels
            for kind, _, name in [label.rpartition(" ")]
        ]


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
        {**setting._asdict(), "owner": None if setting.owner is None else asdict(setting.owner)}
        for setting in plugin_settings()
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


def _config_file() -> str | None:
    try:
        path = sources.find().path
    except OpweaveError:
        return None  # among the problems
    return str(path) if path else None


# Plugins as a table.


_STYLES = {"failed": "bold red", "active": "green", "loaded": "green"}


def plugin_table(plugins: Iterable[Mapping[str, Any]]) -> Table:
    """Return a row per plugin: state, load time and registrations."""
    table = PlainTable("plugin", "group", "distribution", "state", "ms", "registered", "")
    for plugin in plugins:
        style = _STYLES.get(plugin["state"], "default")
        table.add_row(
            escape(plugin["name"]),
            escape(plugin["group"].removeprefix("opweave.")),
            escape(f"{plugin['distribution']} {plugin['version']}"),
            f"[{style}]{plugin['state']}[/]",
            f"{plugin['seconds'] * 1e3:.1f}",
            str(len(plugin["registered"]) or "-"),
            escape(plugin["error"] or plugin["detail"]),
        )
    return table


def owner_text(owner: Mapping[str, str] | None) -> str:
    """Format an owner: ``acme (acme-device 0.1.0)``."""
    return "opweave" if owner is None else str(Owner(**owner))


# The command.


def doctor(*, plugin: PluginOption = None, json: Flag = False) -> int:
    """Show versions, the platform and why it was chosen, plugins, replacements and problems.

    Loads every plugin. Exits with 1 if it finds a problem.

    Parameters
    ----------
    json
        Print JSON.
    """
    report = Diagnostics(plugin).report()
    if json:
        print_json(report)
    else:
        _print(report)
    return 1 if report["problems"] else 0


def _print(report: dict[str, Any]) -> None:
    _print_values("versions", report["versions"])
    _print_platform(report["platform"])
    _print_plugins(report["plugins"], report["overrides"])
    _print_settings(report["plugin_settings"])
    _print_values("native kernels", _native(report["native"]))
    _print_values("tools", {tool["name"]: _tool(tool) for tool in report["tools"]})
    _print_values("environment", report["environment"])
    out.print(f"[bold]config file[/]\n  {escape(_show(report['config_file']))}")
    if report["problems"]:
        out.print("[bold red]problems[/]")
        for problem in report["problems"]:
            out.print(f"  {escape(problem)}")
    else:
        out.print("[bold green]no problems[/]")


def _native(status: Mapping[str, Any]) -> dict[str, Any]:
    if not status["available"]:
        return {"available": f"no: {status['reason_missing']}"}
    others = [level for level in status["isa_levels"] if level != status["isa"]]
    return {
        "instruction set": f"{status['isa']} (also: {_show(others)})",
        "direct calls": f"{_show(status['fast_call'])} (kernels are called without torch.ops)",
        "file": status["path"],
    }


def _tool(tool: Mapping[str, Any]) -> str:
    if tool["found"]:
        return str(tool["found"])
    return f"missing: {tool['needed_for']} will not work. {tool['fix']}"


def _print_values(title: str, values: Mapping[str, Any]) -> None:
    out.print(f"[bold]{title}[/]")
    for key, value in values.items():
        out.print(escape(f"  {key:<22} {_show(value)}"))


def _print_platform(platform: dict[str, Any] | None) -> None:
    if platform is None:
        out.print("[bold]platform[/]\n  [bold red]none could be chosen[/]")
        return
    capabilities = platform.pop("capabilities", {})
    facts = platform.pop("facts", {})
    candidates = [
        f"{claim['name']} ({claim['score']}{', ' if claim['why'] else ''}{claim['why']})"
        for claim in platform.pop("candidates")
    ]
    frames = [part.partition("\n")[0] for part in platform.pop("first_asked_by").split("File ")]
    shown = {
        **platform,
        "owner": owner_text(platform["owner"]),
        "candidates": candidates,
        "capabilities": [name for name, has in capabilities.items() if has],
        # The innermost frame that is in a file.
        "first asked by": next((f for f in reversed(frames) if not f.startswith('"<')), "-"),
        **facts,
    }
    _print_values("platform", shown)


def _print_plugins(plugins: list[dict[str, Any]], overrides: list[dict[str, Any]]) -> None:
    out.print("[bold]plugins[/]")
    out.print(plugin_table(plugins) if plugins else "  none is installed")
    if overrides:
        out.print("[bold]registered by plugins[/]")
        table = PlainTable("kind", "name", "owner", "")
        for row in overrides:
            by = row["replaced_by"]
            replaced = f"replaced by {owner_text(by)}" if by else ""
            table.add_row(
                *map(escape, (row["kind"], row["name"], owner_text(row["owner"]))),
                f"[yellow]{escape(replaced)}[/]",
            )
        out.print(table)


def _print_settings(settings: list[dict[str, Any]]) -> None:
    if not settings:
        return
    out.print("[bold]settings of plugins[/]")
    table = PlainTable("name", "type", "default", "given", "meaning", "owner")
    for setting in settings:
        values = [_show(setting["default"]), _show(setting["given"])]
        owner = owner_text(setting["owner"])
        cells = [setting["name"], setting["kind"], *values, setting["help"], owner]
        table.add_row(*map(escape, cells))
    out.print(table)


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
