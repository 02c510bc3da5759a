"""``opweave doctor``: show the installation and its problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from opweave.cli.diagnostics import Diagnostics
from opweave.cli.flag import Flag
from opweave.cli.output import out, print_json
from opweave.cli.plugin_options import PluginOption
from opweave.cli.plugin_tables import owner_text, plugin_table
from opweave.cli.tables import PlainTable


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
    _print_values("tools", {each["name"]: _tool(each) for each in report["tools"]})
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
        f"{each['name']} ({each['score']}{', ' if each['why'] else ''}{each['why']})"
        for each in platform.pop("candidates")
    ]
    asked = _last_frame(platform.pop("first_asked_by"))
    shown = {
        **platform,
        "owner": owner_text(platform["owner"]),
        "candidates": candidates,
        "capabilities": [name for name, has in capabilities.items() if has],
        "first asked by": asked,
        **facts,
    }
    _print_values("platform", shown)


def _last_frame(trace: str) -> str:
    """Return the innermost frame of a stack trace that is in a file."""
    frames = [part.partition("\n")[0] for part in trace.split("File ")]
    return next((frame for frame in reversed(frames) if not frame.startswith('"<')), "-")


def _print_plugins(plugins: list[dict[str, Any]], overrides: list[dict[str, Any]]) -> None:
    out.print("[bold]plugins[/]")
    out.print(plugin_table(plugins) if plugins else "  none is installed")
    if overrides:
        out.print("[bold]registered by plugins[/]")
        table = PlainTable("kind", "name", "owner", "")
        for each in overrides:
            by = each["replaced_by"]
            replaced = f"replaced by {owner_text(by)}" if by else ""
            table.add_row(
                *map(escape, (each["kind"], each["name"], owner_text(each["owner"]))),
                f"[yellow]{escape(replaced)}[/]",
            )
        out.print(table)


def _print_settings(settings: list[dict[str, Any]]) -> None:
    if not settings:
        return
    out.print("[bold]settings of plugins[/]")
    table = PlainTable("name", "type", "default", "given", "meaning", "owner")
    for each in settings:
        shown = [each["name"], each["kind"], _show(each["default"]), _show(each["given"])]
        cells = [*shown, each["help"], owner_text(each["owner"])]
        table.add_row(*map(escape, cells))
    out.print(table)


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
