"""What a module imports, and where the sketch imports it from."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from importlib import import_module
from importlib.util import find_spec

from opweave import layers as own_layers
from opweave.cli.migration.syntax import dotted

_VLLM_API = "opweave.integrations.vllm_api"


def imports_of(node: ast.AST) -> dict[str, str]:
    """Return what each name that an import in *node* binds stands for, as a dotted name."""
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
    """Return the dotted name *node*, with what its first part was imported as."""
    first, dot, rest = dotted(node).partition(".")
    return imports.get(first, first) + dot + rest


def moved(node: ast.Import | ast.ImportFrom, used: Set[str]) -> Iterator[str]:
    """Yield the imports that *node* becomes; of vLLM's names, only those that are *used*."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            ours = _in_vllm_api(alias.name) if alias.asname else None
            yield ast.unparse(ast.Import([ast.alias(ours or alias.name, alias.asname)]))
    elif node.level or not _is_vllm(node.module or ""):
        yield ast.unparse(node)
    else:
        for alias in node.names:
            if alias.name == "*" or (alias.asname or alias.name) in used:
                module = _home(node.module or "", alias.name)
                yield ast.unparse(ast.ImportFrom(module, [alias], 0))


def remaining_imports(text: str) -> list[str]:
    """Return the modules of vLLM's that a sketch still imports."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return sorted(set(filter(_is_vllm, modules)))


def _home(module: str, name: str) -> str:
    """Return the module that has what vLLM's *module* has under *name*: opweave's, if one does."""
    if f"{module}.".startswith("vllm.model_executor.") and name in own_layers.__all__:
        return "opweave.layers"
    ours = _in_vllm_api(module)
    return ours if ours and name in getattr(import_module(ours), "__all__", ()) else module


def _in_vllm_api(module: str) -> str | None:
    """Return the module of opweave's that has the names of vLLM's *module*, if there is one."""
    if not _is_vllm(module):
        return None
    ours = _VLLM_API + module.removeprefix("vllm")
    try:
        return ours if find_spec(ours) else None
    except ModuleNotFoundError:  # of a package on the way to it
        return None


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"
