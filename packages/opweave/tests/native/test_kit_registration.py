"""Ops that torch rejects are found when a module is built or loaded, not at a call."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from opweave import native
from opweave.native import NativeBuildError, NativeImportError, calls, opened_modules
from support.warm_python import warm_python

from .kit_module import add_source, empty_source

WORDS = ("in", "is", "class", "def", "None", "global", "return", "and")
REFUSED = [
    *(
        pytest.param(
            f"f(Tensor x, int {word}) -> ()",
            "const View&, int64_t",
            f"found '{word}'",
            marks=[] if word == "in" else [pytest.mark.slow],
        )
        for word in WORDS
    ),
    ("f(Tensor(!) x) -> ()", "const View&", "found '!'"),
    ("f(Tensor x, Tensor?(a!) y) -> ()", "const View&, const View*", "found '('"),
    ("f(Tensor x) -> int junk more", "const View&", "found 'ident'"),
    ("is(Tensor x) -> ()", "const View&", "found 'is'"),
    ("name(Tensor x) -> ()", "const View&", "torch reserves 'name' in every namespace"),
    ("f(Tensor(a!) lambda) -> ()", "const View&", "'lambda' is a Python keyword or starts with"),
    ("f(Tensor(a!) x, float _x_base) -> ()", "const View&, double", "'_x_base' is a Python key"),
]


@pytest.mark.parametrize(("schema", "parameters", "why"), REFUSED)
def test_a_schema_that_torch_refuses(
    native_cache: Path, tmp_path: Path, schema: str, parameters: str, why: str
) -> None:
    with pytest.raises(NativeBuildError) as error:
        native.load("kit_refused", [empty_source(tmp_path, schema, parameters)])
    summary = error.value.summary
    assert summary.startswith("kit_refused is built but does not load: ")
    assert f"'{schema}'" in summary
    assert why in summary
    assert "\n" not in str(error.value)
    assert "kit_refused" not in opened_modules()


def test_a_module_without_an_op(native_cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "nothing.cpp"
    source.write_text("#include <opweave/extension.h>\n", encoding="utf-8")
    with pytest.raises(
        NativeBuildError, match=r"^kit_nothing is built .* its sources register no op"
    ):
        native.load("kit_nothing", [source])
    assert "kit_nothing" not in opened_modules()


def test_a_schema_in_several_lines(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "1", schema="add(\\n    Tensor(a!)\\t x\\n) -> ()")
    module = native.load("kit_lines", [source])
    assert module.add.direct.__doc__ == "add( Tensor(a!) x ) -> ()"
    x = torch.zeros(1)
    module.add(x)
    torch.ops.kit_lines.add(x)
    assert x.tolist() == [2]


def test_the_corrected_source_loads(native_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    good = add_source(tmp_path, "1")
    for _ in range(2):
        wrong = empty_source(tmp_path / "more", "f(Tensor x, int in) -> ()", "const View&, int64_t")
        with pytest.raises(NativeBuildError, match="found 'in'"):
            native.load("kit_corrected", [good, wrong])
    empty_source(tmp_path / "more", "f(Tensor x, int i) -> ()", "const View&, int64_t")
    module = native.load("kit_corrected", [good, wrong])
    x = torch.zeros(2)
    with torch.enable_grad():
        module.add(x)
        module.f(x, 3)
    assert x.tolist() == [1, 1]


def test_an_op_that_exists(native_cache: Path, tmp_path: Path) -> None:
    library = torch.library.Library("kit_exists", "FRAGMENT")
    library.define("add(Tensor x) -> ()")
    source = add_source(tmp_path, "1")
    with pytest.raises(NativeBuildError, match=r"torch\.ops\.kit_exists\.add already exists"):
        native.load("kit_exists", [source])
    source = add_source(tmp_path, "2", schema="two(Tensor(a!) x) -> ()")
    module = native.load("kit_exists", [source])
    x = torch.zeros(1)
    with torch.enable_grad():
        module.two(x)
    assert x.tolist() == [2]


class Raw(ModuleType):
    """A module of the kit whose registration ends with *problem*."""

    def __init__(self, problem: str | None, *schemas: str) -> None:
        super().__init__("kit_raw")
        self.__file__ = f"{schemas}"
        self._problem = problem
        for schema in schemas:
            function: Any = lambda *_: None  # noqa: E731
            function.__doc__ = schema
            setattr(self, schema.partition("(")[0], function)

    def _open(self, *_: type) -> tuple[bool, str | None]:
        return False, self._problem

    def _namespace(self) -> str:
        return "kit_raw"


def test_import_module_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kit_raw", Raw(None))
    with pytest.raises(
        NativeImportError, match=r"^kit_raw does not load: its sources register no op"
    ):
        native.import_module("kit_raw")
    refused = Raw(None, "f(Tensor x, int in) -> ()")
    monkeypatch.setitem(sys.modules, "kit_raw", refused)
    with pytest.raises(
        NativeImportError, match=r"^kit_raw does not load: .*'f\(Tensor x, int in\) "
    ):
        native.import_module("kit_raw")
    late = Raw("torch could not define f(Tensor x) -> ()", "f(Tensor x) -> ()")
    monkeypatch.setitem(sys.modules, "kit_raw", late)
    with pytest.raises(NativeImportError, match=r"^kit_raw does not load: torch could not define"):
        native.import_module("kit_raw")


def test_a_torch_that_lacks_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is imported, and its ops say what is missing."""
    raw = Raw(
        "this torch has no torch_list_size; torch 2.11 or newer is needed", "g(Tensor x) -> ()"
    )
    monkeypatch.setitem(sys.modules, "kit_raw", raw)
    module = native.import_module("kit_raw")
    with pytest.raises(
        RuntimeError, match=r"torch\.ops\.kit_raw\.g is not available: this torch has"
    ):
        module.g(torch.ones(1))


def test_opweaves_own_module_degrades(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "torch could not define h(Tensor x) -> ()"
    monkeypatch.setattr(calls, "_opened", {})
    assert calls.open_call_paths(Raw(problem, "h(Tensor x) -> ()"), "kit_own")[1] == problem


@pytest.mark.parametrize("name", ["csv", "opweave.native"])
def test_a_module_that_is_not_native(name: str) -> None:
    with pytest.raises(NativeImportError, match=f"^{name} is not a native module built by this"):
        native.import_module(name)
    assert name.replace(".", "_") not in opened_modules()


@pytest.mark.parametrize("name", ["", ".demo", "demo/_C_ops", "demo.", 3])
def test_what_is_not_the_name_of_a_module(name: Any) -> None:
    with pytest.raises(NativeImportError, match=f"^{name!r} is not the name of a module, such as"):
        native.import_module(name)


# Some builds of torch have the C++ library found by whoever comes after them.
HAS_CXX_LIBRARY = hasattr(ctypes.CDLL(None), "_ZTVN10__cxxabiv120__si_class_type_infoE")


@pytest.mark.slow
@pytest.mark.skipif(HAS_CXX_LIBRARY, reason="a C++ library is there")
def test_a_c_compiler(native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "gcc")
    with pytest.raises(NativeBuildError) as error:
        native.load("kit_gcc", [add_source(tmp_path, "1")])
    assert "does not load: undefined symbol: " in error.value.summary
    assert error.value.summary.endswith("name a C++ compiler, such as CXX=g++.")


def test_a_module_that_ends_the_process(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "1")
    with open(source, "a", encoding="utf-8") as file:
        file.write("#include <cstdlib>\nstatic const int ended = (std::abort(), 0);\n")
    with pytest.raises(NativeBuildError, match="does not load: Python ended with -6"):
        native.load("kit_abort", [source])


def test_other_modules_of_that_name_stay(native_cache: Path, tmp_path: Path) -> None:
    import json

    module = native.load("json", [add_source(tmp_path, "1")])
    assert sys.modules["json"] is json
    assert module is not json


def test_a_name_that_a_graph_cannot_spell(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "1", schema="add(Tensor(a!) x) -> ()")
    text = source.read_text(encoding="utf-8").replace('"add(', '"lambda(')
    source.write_text(text, encoding="utf-8")
    with pytest.raises(
        NativeBuildError, match=r"'lambda\(.*cannot be compiled: 'lambda' is a Python"
    ):
        native.load("kit_lambda", [source])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (r'throw std::runtime_error("my own \xff reason");', "my own ? reason"),
        ("throw 3;", "threw something other than a std::exception"),
        (
            'm.def("f(Tensor x) -> ()", static_cast<void (*)(const opweave::View&)>(nullptr));',
            "schema 'f(Tensor x) -> ()' has a null pointer for its function",
        ),
    ],
    ids=["std::exception", "a number", "null"],
)
def test_a_block_that_fails(native_cache: Path, tmp_path: Path, block: str, message: str) -> None:
    source = tmp_path / "fails.cpp"
    source.write_text(
        "#include <stdexcept>\n#include <opweave/extension.h>\n"
        f"OPWEAVE_EXTENSION_MODULE(m) {{ {block} }}\n",
        encoding="utf-8",
    )
    with pytest.raises(NativeBuildError) as error:
        native.load("kit_fails", [source])
    assert error.value.summary.startswith("kit_fails is built but does not load: ")
    assert message in error.value.summary


def test_blocks_on_the_same_line_of_two_files(native_cache: Path, tmp_path: Path) -> None:
    for op in ("one", "two"):
        folder = tmp_path / op
        folder.mkdir()
        add_source(folder, "1", schema=f"{op}(Tensor(a!) x) -> ()")
    both = tmp_path / "both.cpp"
    both.write_text('#include "one/one.cpp"\n#include "two/two.cpp"\n', encoding="utf-8")
    module = native.load("kit_unity", [both])
    x = torch.zeros(2)
    module.one(x)
    module.two(x)
    assert x.tolist() == [2, 2]


def test_a_module_may_print_when_python_ends(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "1")
    text = source.read_text(encoding="utf-8")
    printing = '#include <cstdio>\nstruct Last { ~Last() { std::puts("{1 call}"); } } last;\n'
    source.write_text(printing + text, encoding="utf-8")
    assert native.load("kit_printing", [source]).add.direct.__doc__.startswith("add(")
    crashing = "struct Last { ~Last() { __builtin_trap(); } } last;\n"
    source.write_text(crashing + text, encoding="utf-8")
    with pytest.raises(NativeBuildError, match=r"when Python exits, it ends with SIG(ILL|TRAP)"):
        native.load("kit_crashing", [source])


def test_a_module_in_another_package(native_cache: Path, tmp_path: Path) -> None:
    raw = native.load("kit_moved", [add_source(tmp_path, "1")])
    assert raw.__file__ is not None
    package = tmp_path / "elsewhere"
    package.mkdir()
    shutil.copy(raw.__file__, package / "kit_moved.abi3.so")
    code = "from opweave import native; native.import_module('elsewhere.kit_moved')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = warm_python().run("-c", code, env=env)
    assert "its ops belong to torch.ops.kit_moved, but those of this package must be in" in (
        done.stderr
    )
