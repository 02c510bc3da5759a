"""Imports run downward only."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "packages"
# Of each package: its folder of modules, and its layers. Uppermost first; a layer may import those
# below it. "" holds all modules that no other layer names.
PACKAGES = {
    "opweave_vllm": (ROOT / "opweave-vllm" / "src", ["migrate", "", "vllm_api"]),
    "opweave_engine": (
        ROOT / "opweave-engine" / "src",
        ["cli", "server", "", "transformers", "models"],
    ),
    # ``_first_use`` (what happens when an op is first used) stands outside: it hangs everything
    # into ``ir`` at run time.
    "opweave": (
        ROOT / "opweave" / "src",
        [
            "cli",
            "optimization",
            "layers",
            "compile",
            "tuning",
            "conformance",
            "worker",
            "kernels",
            "platforms",
            "plugins",
            "native",
            "config",
            "ir",
            "plain_call",
            "torch_compat",
            "transaction",
            "errors",
            "registration",
            "packages",
        ],
    ),
}
# Packages that a package may import.
NEEDS = {
    "opweave_vllm": {"opweave_vllm", "opweave"},
    "opweave_engine": {"opweave_engine", "opweave"},
    "opweave": {"opweave"},
}
OUTSIDE = {"__init__", "__main__", "_first_use", "_custom_ops", "_C_ops"}
FILES = sorted(file for name, (root, _) in PACKAGES.items() for file in (root / name).rglob("*.py"))


def package_of(module: str) -> str:
    return module.partition(".")[0]


def source_of(path: Path) -> Path:
    return next(root for root, _ in PACKAGES.values() if path.is_relative_to(root))


def layer_of(module: str) -> str:
    """Return the layer; the native ops' wrappers count as ``native``."""
    parts = module.split(".")
    if parts[0] == "opweave":
        if parts[1:2] == ["_custom_ops"]:
            return "native"
        return parts[1] if len(parts) > 1 else "__init__"
    layers = PACKAGES[parts[0]][1]
    return parts[1] if len(parts) > 1 and parts[1] in layers else ""


def module_of(path: Path) -> str:
    parts = path.relative_to(source_of(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layers() -> list[tuple[str, str]]:
    return [(package, layer) for package, (_, names) in PACKAGES.items() for layer in names]


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
            if base in PACKAGES:  # ``from opweave import ir``
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def test_every_folder_has_its_place() -> None:
    source = PACKAGES["opweave"][0] / "opweave"
    folders = {path.relative_to(source).parts[0] for path in FILES if path.is_relative_to(source)}
    names = {folder.removesuffix(".py") for folder in folders}
    assert names <= {*PACKAGES["opweave"][1], *OUTSIDE}, "add the folder to PACKAGES and the design"


@pytest.mark.parametrize(("package", "layer"), layers())
def test_imports_run_downward_only(package: str, layer: str) -> None:
    names = PACKAGES[package][1]
    below = set(names[names.index(layer) :])
    upward = []
    for path in FILES:
        module = module_of(path)
        if package_of(module) != package or layer_of(module) != layer:
            continue
        for line, imported in imports(path):
            target = package_of(imported)
            if target not in PACKAGES:
                continue
            if target == package:
                is_allowed = layer_of(imported) in {*below, "__init__", "__version__", "_C_ops"}
            else:
                is_allowed = target in NEEDS[package]
            if not is_allowed:
                upward.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not upward


def test_strings_name_no_module_of_a_package_above() -> None:
    """Classes that are imported by their name, and prefixes that loggers are compared with."""
    upward = set()
    for path in FILES:
        package = package_of(module_of(path))
        above = tuple(f"{name}." for name in PACKAGES if name not in NEEDS[package])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and above and text.startswith(above):
                upward.add(path.relative_to(source_of(path) / package).as_posix())
    assert upward == set()


@pytest.mark.parametrize(
    "layer", ["ir", "torch_compat", "transaction", "errors", "registration", "packages"]
)
def test_the_lowest_layers_import_torch_and_the_standard_library_only(layer: str) -> None:
    foreign = []
    for path in FILES:
        module = module_of(path)
        if package_of(module) != "opweave" or layer_of(module) != layer:
            continue
        for line, imported in imports(path):
            top = package_of(imported)
            if top in ("torch", "opweave") or top in sys.stdlib_module_names:
                continue  # which layers of opweave: test_imports_run_downward_only
            foreign.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
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
    modules = {module_of(path): path for path in FILES}
    return {
        module: {name for name in run_time_imports(path, modules.keys()) if name != module}
        for module, path in modules.items()
    }


def test_no_circle_of_imports() -> None:
    graph = import_graph()
    assert len(graph) == len(FILES)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_transformers_is_an_oracle_and_no_dependency() -> None:
    users = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        if not {"transformers", "optimization"} & set(path.parts)
        for line, module in imports(path)
        if module.split(".")[0] == "transformers"
    ]
    assert not users


def test_the_rule_sees_every_kind_of_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGES", {"opweave": (tmp_path, ["ir"])})
    (tmp_path / "opweave" / "ir").mkdir(parents=True)
    path = tmp_path / "opweave" / "ir" / "bad.py"
    path.write_text(
        "import opweave.cli.app\nfrom opweave import kernels\nfrom opweave_engine import x\n"
        "from ..layers import y\nfrom . import z\n\ndef f():\n    import opweave.tuning as t\n",
        encoding="utf-8",
    )
    assert [module for _, module in imports(path)] == [
        "opweave.cli.app",
        "opweave.kernels",
        "opweave_engine",
        "opweave.layers",
        "opweave.ir",
        "opweave.tuning",
    ]
