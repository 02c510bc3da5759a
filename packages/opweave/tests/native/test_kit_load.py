"""Just-in-time builds: when modules are rebuilt, by which process, and error messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opweave import native
from opweave.ir.errors import OpweaveError
from opweave.native import NativeBuildError, cache
from opweave.native.builder import Extension

from .kit_module import add_source, compiler_calls

LOAD = """
import sys, torch
from opweave import native
module = native.load(sys.argv[1], sys.argv[2:])
x = torch.zeros(3)
module.add(x)
print(x.tolist(), module.__file__)
"""


def start(*arguments: str, code: str = LOAD) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
def test_two_processes_build_once(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "2")
    processes = [start("kit_twice", str(source)) for _ in range(2)]
    outputs = [finish(process) for process in processes]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("[2.0, 2.0, 2.0] ")
    commands = compiler_calls()
    assert sum(f" {source} " in command for command in commands) == 1
    assert not list(native_cache.rglob("tmp*"))

    # A third one, later, asks the compiler for its version only.
    assert finish(start("kit_twice", str(source))) == outputs[0]
    assert compiler_calls()[len(commands) :] == ["--version"]


COMPILED = """
import sys, torch
from opweave import native
module = native.load("kit_marked", sys.argv[1:])

@torch.compile(fullgraph=True)
def step(x):
    y = x * 2
    module.add(y)
    return y + 1

from torch._dynamo.utils import counters
with torch.no_grad():
    print(step(torch.ones(3)).tolist(), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_corrected_schema_in_a_cached_graph(
    native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op that does not declare its mutation is left out of a graph."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    found = []
    for schema in ("add(Tensor x) -> ()", "add(Tensor(a!) x) -> ()", "add(Tensor(a!) x) -> ()"):
        source = add_source(tmp_path, "4", schema=schema)
        found.append(finish(start(str(source), code=COMPILED)).strip())
    assert found == ["[3.0, 3.0, 3.0] 0", "[7.0, 7.0, 7.0] 0", "[7.0, 7.0, 7.0] 1"]


def test_once_in_a_process(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "1")
    module = native.load("kit_once", [source])
    assert native.load("kit_once", [str(source)]) is module
    x = torch.zeros(2)
    module.add(x)
    torch.ops.kit_once.add(x)
    assert x.tolist() == [2, 2]
    add_source(tmp_path, "5")
    with pytest.raises(NativeBuildError, match="'kit_once' from other sources or flags is already"):
        native.load("kit_once", [source])
    module = native.load("kit_once_more", [source])  # the same op name in another namespace
    module.add(x)
    assert x.tolist() == [7, 7]


def test_what_the_key_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    source, far = tmp_path / "a.cpp", tmp_path / "include" / "far.h"
    source.write_text('#include "near.h"\n#include <vector>\n', encoding="utf-8")
    (tmp_path / "near.h").write_text(" #  include <far.h>\n", encoding="utf-8")
    far.write_text("1", encoding="utf-8")

    def key(**changed: object) -> str:
        given: dict[str, object] = {
            "module": "a",
            "namespace": "a",
            "sources": (source,),
            "include_dirs": (tmp_path / "include",),
        }
        return cache.content_key(Extension(**{**given, **changed}))  # type: ignore[arg-type]

    first = key()
    assert key() == first
    keys = {first}
    keys.add(key(namespace="b"))
    keys.add(key(cflags=("-DX",)))
    keys.add(key(ldflags=("-lm",)))
    far.write_text("2", encoding="utf-8")
    keys.add(key())
    assert key(include_dirs=(), cflags=(f"-I{tmp_path / 'include'}",)) not in keys
    source.write_text("3", encoding="utf-8")
    keys.add(key())
    monkeypatch.setattr("opweave.native.toolchain.fingerprint", lambda: "newer")
    keys.add(key())
    assert len(keys) == 7
    clang = tmp_path / "clang"
    clang.write_text("#!/bin/sh\necho another compiler\n", encoding="utf-8")
    clang.chmod(0o755)
    monkeypatch.setenv("CXX", str(clang))
    assert key() not in keys
    monkeypatch.setenv("CXX", f"{clang} -march=native")
    native_key = key()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags: another processor")
    assert key() != native_key


def refusal(name: str, *sources: Path, **options: object) -> NativeBuildError:
    with pytest.raises(NativeBuildError) as error:
        native.load(name, sources, **options)  # type: ignore[arg-type]
    assert isinstance(error.value, OpweaveError)
    assert "\n" not in error.value.summary
    return error.value


def test_syntax_error(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "nonsense")
    error = refusal("kit_syntax", source)
    assert error.summary == "add.cpp does not compile; the compiler's message follows."
    assert "nonsense" in error.log
    assert "error" in error.log
    assert error.log in str(error)
    add_source(tmp_path, "1")
    native.load("kit_syntax", [source])


def of_functions(tmp_path: Path, functions: list[str], schema: str) -> Path:
    """Write a source with an op of each of the *functions*, all of *schema*."""
    source = tmp_path / "f.cpp"
    ops = [(function.replace(" f(", f" f{i}("), i) for i, function in enumerate(functions)]
    source.write_text(
        "#include <opweave/extension.h>\nusing namespace opweave;\n"
        + "".join(f"static {function}\n" for function, _ in ops)
        + "OPWEAVE_EXTENSION_MODULE(m) {\n"
        + "".join(f'm.def("f{i}{schema}", f{i});\n' for _, i in ops)
        + "}\n",
        encoding="utf-8",
    )
    return source


def test_wrong_parameter_types(native_cache: Path, tmp_path: Path) -> None:
    wrong = ("float", "std::optional<int>", "std::optional<float>", "std::optional<View>")
    functions = [f"void f(const View&, {parameter}) {{}}" for parameter in wrong]
    log = refusal("kit_type", of_functions(tmp_path, functions, "(Tensor x, int? y) -> ()")).log
    message = "a parameter is const View&, const View*, int64_t"
    errors = [line for line in log.splitlines() if "error:" in line and message in line]
    assert len(errors) == len(wrong)


@pytest.mark.parametrize("in_tuple", [False, True])
def test_wrong_result_types(native_cache: Path, tmp_path: Path, in_tuple: bool) -> None:
    wrong = ["float", "std::optional<int64_t>", "IntList"]
    results = [f"std::tuple<int64_t, {each}>" for each in wrong] if in_tuple else wrong
    functions = [f"{result} f(const View&) {{ throw 0; }}" for result in results]
    log = refusal("kit_type", of_functions(tmp_path, functions, "(Tensor x) -> int")).log
    message = "an op returns void, int64_t, double, bool, or a std::tuple of these"
    errors = [line for line in log.splitlines() if "error:" in line]
    assert len(errors) == len(wrong)
    assert all(message in line for line in errors)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("add(Tensor(a!) x, str s) -> ()", "argument type 'str' is not one of Tensor, int"),
        ("add(Tensor(a!) x, int i) -> ()", "has 2 arguments, its function has 1 parameters"),
        ("add(Tensor(a!) x) -> int", "returns int, its function returns ()"),
    ],
)
def test_bad_schema(native_cache: Path, tmp_path: Path, schema: str, message: str) -> None:
    error = refusal("kit_schema", add_source(tmp_path, "1", schema=schema))
    assert error.summary.startswith("kit_schema is built but does not load: schema 'add(Tensor(a!)")
    assert message in error.summary


def test_duplicate_op(native_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    sources = add_source(tmp_path, "1"), add_source(tmp_path / "other", "2")
    assert "op 'add' is registered twice for CPU" in refusal("kit_duplicate", *sources).summary


def test_bad_input(native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = add_source(tmp_path, "1")
    for name in ("Bad", "a-b", "class", "", "_x", "é"):
        assert "is not a valid name for a native module" in refusal(name, source).summary
    for name in ("aten", "load_library", "higher_order"):
        assert f"'{name}' is taken" in refusal(name, source).summary
    assert "no sources" in refusal("kit_none").summary
    assert "Did you mean 'add.cpp'?" in refusal("kit_gone", tmp_path / "ad.cpp").summary
    assert "is not a source file (.cpp," in refusal("kit_header", tmp_path / "a.h").summary
    (tmp_path / "folder.cpp").mkdir()
    assert "folder.cpp is a folder" in refusal("kit_folder", tmp_path / "folder.cpp").summary
    with pytest.raises(TypeError, match="commands cannot contain NUL characters"):
        native.load("kit_nul", [source], extra_cflags=["-D\0"])
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("OPWEAVE_CACHE_DIR", str(blocked))
    assert "set OPWEAVE_CACHE_DIR" in refusal("kit_cache", source).summary


def no_program(folder: Path) -> Path:
    path = folder / "no-program"
    path.write_bytes(b"\0")
    path.chmod(0o755)
    return path


def test_missing_compilers(
    native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = add_source(tmp_path, "1")
    cuda = source.with_suffix(".cu")
    cuda.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    assert "CUDACXX=no-such-nvcc: program" in refusal("kit_no_nvcc", cuda).summary
    for value, why in (
        ('"x', 'CXX="x is not a command: No closing quotation.'),
        ("/bin/true", "/bin/true reports success but writes no file for "),
        (str(no_program(tmp_path)), "Cannot run "),
    ):
        monkeypatch.setenv("CXX", value)
        assert refusal("kit_no_compiler", source).summary.startswith(why)
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert "CXX=no-such-compiler -m64: program" in refusal("kit_no_cxx", source).summary
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CUDACXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "needs a C++17 compiler, but" in refusal("kit_no_path", source).summary


def test_a_string_is_no_list(native_cache: Path, tmp_path: Path) -> None:
    source = add_source(tmp_path, "1")
    for sources in (str(source), source, source.name.encode(), 3):
        with pytest.raises(TypeError, match=r"^sources must be a list of paths, found .*; wri"):
            native.load("kit_list", sources)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^sources must be a list of paths, found 3 in it\.$"):
        native.load("kit_list", [3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"^include_dirs must be a list of paths, found 'a'"):
        native.load("kit_list", [source], include_dirs="a")
    for option in ("extra_cflags", "extra_cuda_cflags", "extra_ldflags"):
        with pytest.raises(TypeError, match=f"^{option} must be a list of strings, found '-O2'"):
            native.load("kit_list", [source], **{option: "-O2"})  # type: ignore[arg-type]
    native.load("kit_list", iter([source]), extra_cflags=("-O1",), include_dirs=iter([tmp_path]))


@pytest.mark.parametrize("name", ["errno", "assert_perror"])
def test_a_name_of_a_macro(native_cache: Path, tmp_path: Path, name: str) -> None:
    module = native.load(name, [add_source(tmp_path, "1")])
    x = torch.zeros(1)
    with torch.enable_grad():
        module.add(x)
    assert x.tolist() == [1]
    assert hasattr(getattr(torch.ops, name), "add")
