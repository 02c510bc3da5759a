"""``opweave native new`` and ``build``, as a new user would try them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opweave.cli import native as command
from opweave.native import scaffold
from support.warm_python import warm_python

CODE = """
import sys
from opweave.cli import app
try:
    from opweave.cli.native import native
    app.app.command(native)
except Exception:
    pass
app.main()
"""

VERIFY = "from opweave.cli import main; main(['verify', '--provider', 'demo', '--json'])"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(native_cache: Path, tmp_path: Path) -> Run:
    """Run Python in an empty folder."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        env = {**os.environ, "PYTHONPATH": paths, **environment}
        return warm_python().run(*arguments, cwd=tmp_path, env=env)

    return run


@pytest.fixture
def opweave(run: Run) -> Run:
    """Run the command line: ``opweave native ...``."""
    return lambda *arguments, **environment: run("-c", CODE, "native", *arguments, **environment)


def test_new_build_test(
    opweave: Run, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    created = opweave("new", "demo")
    assert created.returncode == 0, created.stderr
    assert "Now: opweave native build demo && pip install pytest && pytest demo" in created.stdout

    built = opweave("build", "demo", "--json")
    assert built.returncode == 0, built.stderr
    module = tmp_path / "demo" / "src" / "demo" / "_C_ops.abi3.so"
    assert json.loads(built.stdout) == {"path": str(module), "cached": False}

    tested = run("-m", "pytest", "demo", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "12 passed" in tested.stdout

    path = os.pathsep.join([str(tmp_path / "demo/src"), *sys.path])
    verified = run("-c", VERIFY, PYTHONPATH=path, OMP_NUM_THREADS="1")
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


def test_without_the_module_the_op_still_runs(run: Run, tmp_path: Path) -> None:
    scaffold.new("unbuilt", tmp_path)
    code = (
        "import torch\nfrom opweave import ir\nfrom unbuilt import unbuilt_softcap as op\n"
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
        (None, "{folder}/pyproject.toml does not exist; `opweave native new NAME` creates"),
        ("[tool", "Cannot read {folder}/pyproject.toml: "),
        ("", "{folder}/pyproject.toml has no table [tool.opweave-native], which configures"),
        (PYPROJECT.replace("sources", "source"), "has an unknown key 'source'. Did you mean 'sou"),
        (PYPROJECT.replace('"demo._C_ops"', "3"), "needs module = 'package._C_ops', found 3"),
        (
            PYPROJECT.replace("demo._C_ops", "demo"),
            "module = 'demo' does not name a package; try 'demo._",
        ),
        (
            PYPROJECT.replace('["csrc/*.cpp"]', '"x"'),
            "sources must be a list of strings, f",
        ),
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


def test_a_folder_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    with pytest.raises(SystemExit) as error:
        command.new("demo")
    assert error.value.code == 2
    expected = f"opweave: {tmp_path / 'demo'} already exists; choose another name.\n"
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize(
    "name", ["Demo", "my-ops", "1st", "lambda", "torch", "json", "../x", "", "ops_", 300 * "a"]
)
def test_bad_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        command.new(name)
    assert error.value.code == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pip_builds_a_wheel_in_an_isolated_environment(run: Run, tmp_path: Path) -> None:
    scaffold.new("packed", tmp_path)
    folder = tmp_path / "wheels"
    done = run("-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, tmp_path / "packed")
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("packed-0.1.0-cp310-abi3-*.whl")
    shutil.unpack_archive(wheel, tmp_path / "unpacked", format="zip")
    assert (tmp_path / "unpacked" / "packed" / "_C_ops.abi3.so").is_file()
