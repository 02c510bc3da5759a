"""The layers that ``opweave ops`` lists."""

from __future__ import annotations

import inspect
from typing import Any

from rich.markup import escape
from rich.table import Table
from torch import nn

from opweave.cli.tables import ListTable, PlainTable
from opweave.layers import CustomOp, op_registry, replacement
from opweave.layers.registry import full_name, owner_of

_ENABLED = {True: "yes", False: "no", None: ""}


def layers(name: str | None) -> list[dict[str, Any]]:
    """Return the registered layers, or those of that name, as plain data."""
    return [
        _describe(key, layer) for key, layer in sorted(op_registry.items()) if name in (None, key)
    ]


def _describe(name: str, layer: type[nn.Module]) -> dict[str, Any]:
    found = replacement(layer)
    is_op = issubclass(layer, CustomOp)
    return {
        "layer": name,
        "kind": "CustomOp" if is_op else "PluggableLayer",
        "class": full_name(layer),
        "summary": (inspect.getdoc(layer) or "").partition("\n")[0],
        "enabled": found.enabled() if issubclass(found, CustomOp) else None,
        "replacement": None if found is layer else full_name(found),
        "plugin": _plugin(found),
    }


def _plugin(layer: type[nn.Module]) -> str | None:
    owner = owner_of(layer)
    return None if owner is None else str(owner)


def layer_overview(found: list[dict[str, Any]]) -> Table:
    """Return a table with one line per layer."""
    table = ListTable("layer", "kind", "enabled", "replaced by")
    for layer in found:
        row = (layer["layer"], layer["kind"], _ENABLED[layer["enabled"]], layer["replacement"])
        table.add_row(*(escape(cell or "") for cell in row))
    return table


def layer_table(found: list[dict[str, Any]]) -> Table:
    """Return a table of layers with the class of each."""
    table = PlainTable("layer", "kind", "enabled", "class", "replaced by")
    for layer in found:
        enabled = _ENABLED[layer["enabled"]]
        row = (layer["layer"], layer["kind"], enabled, layer["class"], layer["replacement"])
        table.add_row(*(escape(cell or "") for cell in row))
    return table
