"""``opweave new --kernel cpp`` and ``opweave native build``, as a new user would try them."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from opweave.cli import native as command
from opweave.cli.new import create
from support.warm_python import warm_python

COMMAND = "import sys; from opweave.cli import main; main(sys.argv[1:])"

EMPTY_OP = """
#include <opweave/extension.h>
static void nothing(const opweave::View& x) {}
OPWEAVE_EXTENSION_MODULE(m) { m.def("nothing(Tensor x) -> ()", nothing); }
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(native_cache: Path, tmp_path: Path) -> Run:
    """Run Python in an empty folder."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        env = {**os.environ, "PYTHONPATH": paths, **environment}
        return warm_python().run(*arguments, cwd=tmp_path, env=env)

    return run


def test_new_build_test(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    create("demo", tmp_path, kernel="cpp")
    built = run("-c", COMMAND, "native", "build", "demo", "--json")
    assert built.returncode == 0, built.stderr
    module = tmp_path / "demo" / "src" / "demo" / "_C_ops.abi3.so"
    assert json.loads(built.stdout) == {"path": str(module), "cached": False}

    quick = "runs_by_default or metadata or predicate or batch_invariance"
    tested = run("-m", "pytest", "demo", "-q", "-p", "no:cacheprovider", "-k", quick)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "4 passed" in tested.stdout

    path = os.pathsep.join([str(tmp_path / "demo/src"), *sys.path])
    verify = ("verify", "--provider", "demo", "--import", "demo.kernel", "--json")
    verified = run("-c", COMMAND, *verify, PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    [result] = json.loads(verified.stdout)["results"]
    assert result["status"] == "passed"
    assert {"values", "batch_invariance"} <= {check["check"] for check in result["checks"]}
    assert result["microseconds"] < 2 * result["definition_microseconds"]

    assert command.build(tmp_path / "demo", json=True) is None
    assert json.loads(capfd.readouterr().out) == {"path": str(module), "cached": True}

    with open(tmp_path / "demo" / "csrc" / "module.cpp", "a", encoding="utf-8") as file:
        file.write("nonsense\n")
    before = module.read_bytes()
    with pytest.raises(SystemExit) as broken:
        command.build(tmp_path / "demo")
    assert broken.value.code == 2
    first, *rest = capfd.readouterr().err.splitlines()
    assert first == "opweave: module.cpp does not compile; the compiler's message follows."
    assert any(re.search("error:.*nonsense", line) for line in rest)
    assert module.read_bytes() == before


@pytest.mark.slow
def test_the_wheel_has_the_tag_that_an_index_accepts(run: Run, tmp_path: Path) -> None:
    create("packed", tmp_path, kernel="cpp")
    flags = ("-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "wheels")
    done = run("-m", "pip", "wheel", *flags, "./packed")
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "wheels").iterdir()
    tag = re.fullmatch(r"packed-0\.1\.0-cp310-abi3-(\w+)\.whl", wheel.name)
    assert tag is not None
    with zipfile.ZipFile(wheel) as files:
        symbols = re.findall(rb"GLIBC_2\.(\d+)", files.read("packed/_C_ops.abi3.so"))
    newest = max(17, *map(int, symbols))
    assert tag[1] == f"manylinux_2_{newest}_{platform.machine()}"

    # Libraries that the module is linked with may be missing where the wheel is installed.
    pyproject = tmp_path / "packed" / "pyproject.toml"
    linked = re.sub("simd-sources.*", 'ldflags = ["-lm"]', pyproject.read_text("utf-8"))
    pyproject.write_text(linked, encoding="utf-8")
    (tmp_path / "packed" / "csrc" / "softcap.cpp").unlink()
    (tmp_path / "packed" / "csrc" / "module.cpp").write_text(EMPTY_OP, encoding="utf-8")
    done = run("-m", "pip", "wheel", *flags, "./packed")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "wheels").iterdir()} == {
        wheel.name, f"packed-0.1.0-cp310-abi3-linux_{platform.machine()}.whl"
    }  # fmt: skip


def test_without_the_module_the_op_still_runs(run: Run, tmp_path: Path) -> None:
    create("unbuilt", tmp_path, kernel="cpp")
    code = (
        "import torch, unbuilt\nfrom opweave import ir\nunbuilt.register()\n"
        "op = ir.ops.unbuilt_softcap\n"
        "print(op(torch.zeros(2), 1.0).tolist(), op.impls['unbuilt'].unsupported_reason)"
    )
    done = run("-c", f"import sys; sys.path.insert(0, 'unbuilt/src')\n{code}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "[0.0, 0.0] unbuilt._C_ops is not built; build it with: opweave native build FOLDER\n"
    )


PYPROJECT = """
[tool.opweave-native]
module = "demo._C_ops"
sources = ["csrc/*.cpp"]
"""


@pytest.mark.parametrize(
    ("pyproject", "message"),
    [
        (None, "{folder}/pyproject.toml does not exist; `opweave new NAME --kernel cpp` creates"),
        ("[tool", "Cannot read {folder}/pyproject.toml: "),
        ("", "{folder}/pyproject.toml has no table [tool.opweave-native], which configures"),
        (PYPROJECT.replace("sources", "source"), "has an unknown key 'source'. Did you mean 'sou"),
        (PYPROJECT.replace('"demo._C_ops"', "3"), "needs module = 'package._C_ops', found 3"),
        (
            PYPROJECT.replace("demo._C_ops", "demo"),
            "module = 'demo' does not name a package; try 'demo._",
        ),
        (PYPROJECT.replace('["csrc/*.cpp"]', '"x"'), "sources must be a list of strings, f"),
        (PYPROJECT.replace("demo", "aten"), "The package 'aten' was not found in"),
        (PYPROJECT, "The package 'demo' was not found in {folder}/src, {folder}"),
        *(
            (
                PYPROJECT.replace("demo", "csrc").replace("csrc/*.cpp", pattern),
                f"source {pattern!r}",
            )
            for pattern in ("/abs/*.cpp", "", "**.cpp")
        ),
        ("tool = 1", "{folder}/pyproject.toml: tool must be a table, found 1."),
        ("[tool]\nopweave-native = 5", "[tool.opweave-native] must be a table, found 5."),
        ("[tool]\nopweave-native = 'abc'", "[tool.opweave-native] must be a table, found 'abc'."),
        ("[[tool.opweave-native]]", "[tool.opweave-native] must be a table, found [{{}}]."),
        *(
            (PYPROJECT.replace("_C_ops", name), f"found 'demo.{name}'; names must be ASCII ")
            for name in ("опс", "class", "a-b")
        ),
        (
            PYPROJECT.replace("demo", "csrc.lambda"),
            "found 'csrc.lambda._C_ops'; names must be ASCII",
        ),
        (
            PYPROJECT.replace("demo._C_ops", "csrc.python"),
            "The module csrc.python would shadow {folder}/csrc/python.py; choose another name.",
        ),
        (PYPROJECT.replace("demo", "csrc"), "No file in {folder} matches the source 'csrc/*.cpp'"),
    ],
)
def test_bad_projects(
    tmp_path: Path, pyproject: str | None, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "python.py").touch()
    if pyproject is not None:
        (tmp_path / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    with pytest.raises(SystemExit) as error:
        command.build(tmp_path)
    assert error.value.code == 2
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert message.format(folder=tmp_path) in line
