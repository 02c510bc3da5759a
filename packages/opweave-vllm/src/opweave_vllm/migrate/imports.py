"""The imports of a module, and those that replace them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence, Set
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import libcst as cst
from libcst.helpers import get_full_name_for_node

from opweave import layers as own_layers
from opweave_vllm.migrate.syntax import dotted

_VLLM_API = "opweave_vllm.vllm_api"


def imports_of(node: ast.AST) -> dict[str, str]:
    """Return the full name of every name that imports in *node* bind."""
    found = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            for alias in part.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = name
        elif isinstance(part, ast.ImportFrom):
            for alias in part.names:
                full = f"{'.' * part.level}{part.module or ''}.{alias.name}"
                found[alias.asname or alias.name] = full
    return found


def full_name(node: ast.expr, imports: Mapping[str, str]) -> str:
    """Return the dotted name *node*, with the full name of its imported first part."""
    first, dot, rest = dotted(node).partition(".")
    return imports.get(first, first) + dot + rest


def moved(node: cst.BaseSmallStatement, used: Set[str]) -> Sequence[cst.BaseSmallStatement]:
    """Return the imports that replace an import; of names from vLLM, only those *used*."""
    if isinstance(node, cst.Import):
        names = [_moved_module(alias) for alias in node.names]
        return [node.with_changes(names=names)]
    if not isinstance(node, cst.ImportFrom):
        return [node]
    module = get_full_name_for_node(node.module) or "" if node.module else ""
    if node.relative or not _is_vllm(module):
        return [node]
    if isinstance(node.names, cst.ImportStar):
        return [node.with_changes(module=cst.parse_expression(_home(module, "*")))]
    homes: dict[str, list[cst.ImportAlias]] = {}
    for alias in node.names:
        if (alias.evaluated_alias or alias.evaluated_name) in used:
            homes.setdefault(_home(module, alias.evaluated_name), []).append(alias)
    if len(node.names) == sum(map(len, homes.values())) and len(homes) == 1:
        return [node.with_changes(module=cst.parse_expression(next(iter(homes))))]
    return [_from(*each) for each in homes.items()]


def _from(module: str, names: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
    """Return a new import, without the commas of the old one."""
    plain = [alias.with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in names]
    home = cast(cst.Attribute | cst.Name, cst.parse_expression(module))
    return cst.ImportFrom(home, plain)


def _moved_module(alias: cst.ImportAlias) -> cst.ImportAlias:
    ours = _in_vllm_api(alias.evaluated_name) if alias.evaluated_alias else None
    return alias.with_changes(name=cst.parse_expression(ours)) if ours else alias


def remaining_imports(text: str) -> list[str]:
    """Return vLLM's modules that the new text still imports."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return sorted(set(filter(_is_vllm, modules)))


def _home(module: str, name: str) -> str:
    """Return opweave's module that provides *name* of vLLM's *module*, else *module*."""
    if f"{module}.".startswith("vllm.model_executor.") and name in own_layers.__all__:
        return "opweave.layers"
    ours = _in_vllm_api(module)
    return ours if ours and name in getattr(import_module(ours), "__all__", ()) else module


def _in_vllm_api(module: str) -> str | None:
    """Return opweave's module with the names of vLLM's *module*, or None."""
    if not _is_vllm(module):
        return None
    ours = _VLLM_API + module.removeprefix("vllm")
    try:
        return ours if find_spec(ours) else None
    except ModuleNotFoundError:  # a parent package is missing
        return None


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"
