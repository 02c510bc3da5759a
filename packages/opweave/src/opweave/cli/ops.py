"""``opweave ops``: list ops and layers with the kernels available on this machine."""

from __future__ import annotations

import inspect
from typing import Any

from rich.markup import escape
from rich.table import Table
from torch import nn

from opweave.cli.options import Flag, ImportOption, RunOptions, import_modules
from opweave.cli.output import CliError, ListTable, PlainTable, out, print_json
from opweave.ir import IrOp, IrOpImpl, current_registry, policy_for
from opweave.ir.errors import did_you_mean
from opweave.ir.explain import describe
from opweave.layers import CustomOp, op_registry, replacement
from opweave.layers.registry import full_name, owner_of

# The layers that ``opweave ops`` lists.


_ENABLED = {True: "yes", False: "no", None: ""}


def layers(name: str | None) -> list[dict[str, Any]]:
    """Return the registered layers, or those of that name, as plain data."""
    return [
        _describe(key, layer) for key, layer in sorted(op_registry.items()) if name in (None, key)
    ]


def _describe(name: str, layer: type[nn.Module]) -> dict[str, Any]:
    actual = replacement(layer)
    owner = owner_of(actual)
    return {
        "layer": name,
        "kind": "CustomOp" if issubclass(layer, CustomOp) else "PluggableLayer",
        "class": full_name(layer),
        "summary": (inspect.getdoc(layer) or "").partition("\n")[0],
        "enabled": actual.enabled() if issubclass(actual, CustomOp) else None,
        "replacement": None if actual is layer else full_name(actual),
        "plugin": None if owner is None else str(owner),
    }


def _fill(table: Table, rows: list[dict[str, Any]]) -> Table:
    """Add a row per layer to a table whose columns are keys of :func:`layers`, and return it."""
    for layer in rows:
        cells = {
            **layer,
            "enabled": _ENABLED[layer["enabled"]],
            "replaced by": layer["replacement"],
        }
        table.add_row(*(escape(cells[str(column.header)] or "") for column in table.columns))
    return table


# The command.


_OPTIONS = RunOptions()


def ops(
    op: str | None = None,
    /,
    *,
    options: RunOptions = _OPTIONS,
    import_: ImportOption = None,
    json: Flag = False,
) -> None:
    """List ops and layers, one per line, or describe one in detail.

    Parameters
    ----------
    op
        Describe the op or layer of this name: implementations, availability, traits, and the
        source of the priority.
    json
        Print JSON.
    """
    import_modules(import_)
    options.apply()
    name = None if op is None else op.replace("-", "_")
    layer_rows = layers(name)
    chosen = [op for op in current_registry().ops.values() if name in (None, op.name)]
    if name is not None and not layer_rows and not chosen:
        names = {*current_registry().ops, *op_registry}
        raise CliError(f"No op or layer is called {name!r}. {did_you_mean(name, names)}")
    if json:
        print_json([*map(describe, chosen), *layer_rows])
        return
    if name is None:
        out.print(_overview(chosen))
        out.print()
        out.print(_fill(ListTable("layer", "kind", "enabled", "replaced by"), layer_rows))
        out.print("\n(provider): not available here. For details: opweave ops NAME")
        return
    for ir_op in chosen:
        out.print(f"{ir_op.name}{inspect.signature(ir_op.native)}", markup=False)
        out.print(f"declared at {ir_op.site}\n", markup=False)
        out.print(f"{inspect.getdoc(ir_op.native) or ''}\n", markup=False)
        out.print(_details(ir_op))
        for line in _tuned(ir_op):
            out.print(line, markup=False)
    if chosen and layer_rows:
        out.print()
    if layer_rows:
        out.print(_fill(PlainTable("layer", "kind", "enabled", "class", "replaced by"), layer_rows))


def _overview(chosen: list[IrOp]) -> Table:
    table = ListTable("op", "providers by priority; others")
    for op in chosen:
        listed = policy_for(op).priority
        others = sorted(set(op.impls) - {entry.provider for entry in listed})
        groups = (
            [_marked(op.impls[entry.provider], str(entry)) for entry in listed],
            [_marked(op.impls[provider], provider) for provider in others],
        )
        table.add_row(op.name, "; ".join(", ".join(group) for group in groups if group))
    return table


def _marked(impl: IrOpImpl, text: str) -> str:
    return escape(text) if impl.supported else f"[red]({escape(text)})[/]"


def _tuned(op: IrOp) -> list[str]:
    """Return a line for each range of token counts of a tuning file."""
    lines, first = [], 0
    for limit, entries in policy_for(op).tuned:
        numbers = f"{first} tokens or more" if limit is None else f"{first} to {limit} tokens"
        lines.append(f"{numbers}: {entries[0]} first ({entries[0].origin})")
        first = (limit or 0) + 1
    return lines


def _details(op: IrOp) -> Table:
    table = PlainTable("#", "provider", "available", "priority from", "traits")
    listed = {entry.provider: entry for entry in policy_for(op).priority}
    for position, provider in enumerate([*listed, *(p for p in op.impls if p not in listed)]):
        impl, entry = op.impls[provider], listed.get(provider)
        table.add_row(
            str(position + 1) if entry else "-",
            escape(str(entry) if entry else provider),
            "[green]yes[/]" if impl.supported else f"[red]no[/]: {escape(impl.unsupported_reason)}",
            escape(entry.origin) if entry else "in no priority list",
            " ".join([*sorted(impl.traits), *(["in-place"] if impl.inplace else [])]),
        )
    return table
