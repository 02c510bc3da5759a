"""``opweave plugins list``: list installed plugins."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict

from cyclopts import App
from rich.markup import escape

from opweave.cli.doctor import plugin_table
from opweave.cli.options import Flag
from opweave.cli.output import out, print_json
from opweave.ir.errors import OpweaveError
from opweave.platforms import resolution
from opweave.plugins import load_general_plugins, plugin_problems, plugin_report

plugins = App(name="plugins", help="List installed plugins.")


@plugins.command(name="list")
def list_(*, json: Flag = False) -> int:
    """List installed plugins and their state.

    Loads general plugins and queries platform plugins. Exits with 1 if a plugin fails.

    Parameters
    ----------
    json
        Print JSON.
    """
    with suppress(OpweaveError):  # problems of plugins are listed below
        load_general_plugins()
    problem = _resolve_platform()
    records = [{**asdict(each), "state": str(each.state)} for each in plugin_report()]
    problems = list(dict.fromkeys([*plugin_problems(), *problem]))
    if json:
        print_json({"plugins": records, "problems": problems})
    else:
        out.print(plugin_table(records) if records else "No plugin is installed.")
        for each in problems:
            out.print(f"[bold red]✗[/] {escape(each)}")
    return 1 if problems else 0


def _resolve_platform() -> list[str]:
    try:
        resolution()
    except OpweaveError as error:
        return [str(error)]
    return []
