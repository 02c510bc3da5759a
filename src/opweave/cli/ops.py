"""``opweave ops``: what ops and layers there are, and which kernels each op has here."""

from __future__ import annotations

import inspect

from rich.markup import escape
from rich.table import Table

from opweave.cli.compilation import CompilationOption, apply_compilation
from opweave.cli.errors import CliError
from opweave.cli.flag import Flag
from opweave.cli.output import out, print_json
from opweave.cli.plugin_options import PluginOption, apply_plugins
from opweave.cli.priorities import PriorityOption, apply_priorities
from opweave.ir import IrOp, current_registry, policy_for
from opweave.ir.description import describe
from opweave.ir.errors import did_you_mean

_ROOMY = 80  # in a narrower terminal, names that are not folded would leave no room for the rest


def ops(
    op: str | None = None,
    /,
    *,
    ir_op_priority: PriorityOption = None,
    compilation_config: CompilationOption = None,
    plugin: PluginOption = None,
    json: Flag = False,
) -> None:
    """List the ops with their implementations, and the layers; or describe one.

    Parameters
    ----------
    op
        Describe the op and the layer of this name only.
    json
        Print JSON.
    """
    from opweave.cli.layers import layer_table, layers

    apply_plugins(plugin)
    apply_priorities(ir_op_priority)
    apply_compilation(compilation_config)
    name = None if op is None else op.replace("-", "_")
    found, chosen = layers(name), _ops(name)
    if name is not None and not found and not chosen:
        known = {*current_registry().ops, *(layer["layer"] for layer in layers(None))}
        raise CliError(f"No op or layer is called {name!r}. {did_you_mean(name, known)}")
    if json:
        print_json([*map(describe, chosen), *found])
        return
    if chosen:
        out.print(_table(chosen))
    if chosen and found:
        out.print()
    if found:
        out.print(layer_table(found))
    for each in chosen if name is not None else ():
        out.print(f"\n{each.name}{inspect.signature(each.native)}", markup=False)
        out.print(f"declared at {each.site}\n", markup=False)
        out.print(inspect.getdoc(each.native) or "", markup=False)


def _ops(name: str | None) -> list[IrOp]:
    return [op for op in current_registry().ops.values() if name in (None, op.name)]


def _table(chosen: list[IrOp]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("op", "#", "provider", "available", "priority from", "traits"):
        whole = ("op", "#", "provider") if out.width >= _ROOMY else ("#",)
        table.add_column(column, no_wrap=column in whole, overflow="fold")
    for op in chosen:
        listed = {entry.provider: entry for entry in policy_for(op).priority}
        ordered = [*listed, *(p for p in op.impls if p not in listed)]
        for i, provider in enumerate(ordered):
            impl, entry = op.impls[provider], listed.get(provider)
            table.add_row(
                op.name if i == 0 else "",
                str(i + 1) if entry else "-",
                escape(str(entry) if entry else provider),
                "[green]yes[/]"
                if impl.supported
                else f"[red]no[/]: {escape(impl.unsupported_reason)}",
                escape(entry.origin) if entry else "in no priority list",
                " ".join([*sorted(impl.traits), *(["in-place"] if impl.inplace else [])]),
            )
    return table
