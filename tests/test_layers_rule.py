"""Imports run downward only."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "opweave"
FILES = sorted(SOURCE.rglob("*.py"))

# Uppermost first; a package may import those below it. ``_first_use`` (what happens when an op is
# first used) is the one file that stands outside: it hangs everything into ``ir`` at run time.
LAYERS = [
    "cli",
    "server",
    "engine",
    "integrations",
    "models",
    "layers",
    "compile",
    "tuning",
    "conformance",
    "kernels",
    "platforms",
    "plugins",
    "native",
    "config",
    "adapters",
    "ir",
    "base",
]
OUTSIDE = {"__init__", "__main__", "_first_use", "_custom_ops", "_C_ops"}


def layer_of(module: str) -> str:
    """Return the layer; the native ops' wrappers count as ``native``."""
    parts = module.split(".")
    if parts[1:2] == ["_custom_ops"]:
        return "native"
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    parts = ("opweave", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported module, wherever in the file, those for type checkers included."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *filter(None, [base])])
            if base == "opweave":  # ``from opweave import ir``
                yield from ((node.lineno, f"opweave.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def test_every_package_has_its_place() -> None:
    found = {module_of(path).split(".")[1] for path in FILES if path.parent != SOURCE}
    assert found <= set(LAYERS), "add the new package to LAYERS, and to the design"
    assert {path.stem for path in FILES if path.parent == SOURCE} <= OUTSIDE


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_downward_only(layer: str) -> None:
    upward = []
    below = set(LAYERS[LAYERS.index(layer) :])
    for path in FILES:
        if layer_of(module_of(path)) != layer:
            continue
        for line, module in imports(path):
            if module.split(".")[0] != "opweave":
                continue
            target = layer_of(module)
            if target in ("__init__", "__version__", "_C_ops") or target in below:
                continue
            upward.append(f"{path.relative_to(SOURCE)}:{line} imports {module}")
    assert not upward


@pytest.mark.parametrize("layer", ["ir", "base"])
def test_the_lowest_layers_import_torch_and_the_standard_library_only(layer: str) -> None:
    foreign = []
    for path in FILES:
        if layer_of(module_of(path)) != layer:
            continue
        for line, module in imports(path):
            top = module.split(".")[0]
            if top in ("torch", "opweave") or top in sys.stdlib_module_names:
                continue  # which packages of opweave: test_imports_run_downward_only
            foreign.append(f"{path.relative_to(SOURCE)}:{line} imports {module}")
    assert not foreign


def run_time_imports(path: Path, modules: Collection[str]) -> Iterator[str]:
    """Every one of *modules* that a module imports when it runs, in functions, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []  # before ast.walk comes to it
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in full]
        yield from (name for name in names if name in modules)


def import_graph() -> dict[str, set[str]]:
    modules = {
        ".".join(("opweave", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in FILES
    }
    return {
        module: {name for name in run_time_imports(path, modules.keys()) if name != module}
        for module, path in modules.items()
    }


# Imports that close a circle in the engine, to be taken out.
KNOWN = {("opweave_engine.client.open_engine", "opweave_engine.parallel.data_parallel")}


def test_no_circle_of_imports() -> None:
    graph = import_graph()
    assert len(graph) == len(FILES)
    for module, imported in KNOWN:
        graph.get(module, set()).discard(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_transformers_is_an_oracle_and_no_dependency() -> None:
    users = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in FILES
        if "integrations" not in path.parts
        for line, module in imports(path)
        if module.split(".")[0] == "transformers"
    ]
    assert not users


def test_the_rule_sees_every_kind_of_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    (tmp_path / "ir").mkdir()
    path = tmp_path / "ir" / "bad.py"
    path.write_text(
        "import opweave.cli.app\nfrom opweave import kernels\nfrom opweave_engine import x\n"
        "from ..models import y\nfrom . import z\n\ndef f():\n    import opweave.tuning as t\n",
        encoding="utf-8",
    )
    assert [module for _, module in imports(path)] == [
        "opweave.cli.app",
        "opweave.kernels",
        "opweave_engine",
        "opweave_engine.models",
        "opweave.ir",
        "opweave.tuning",
    ]
