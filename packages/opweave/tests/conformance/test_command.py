"""``opweave verify`` and the pytest plugin, as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from opweave import ir
from opweave.cli import main
from opweave.conformance import certificate, subjects, verify
from opweave.ir.testing import restored
from support import ROOT
from support.warm_python import warm_python

from .zoo import ZOO

PACKAGE = ROOT / "packages" / "opweave"
QUICK = ("--check", "values", "--check", "mutation")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def in_this_process(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["verify", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return in_this_process


def test_a_table_and_a_certificate(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    providers = [f"--provider={name}" for name in ("native", "batch_invariant", "opweave_c")]
    code, out, err = run("--op", "silu-and-mul", *providers, *QUICK, "--certificate", file)
    assert code == 0
    assert "silu_and_mul" in out
    assert "batch_invariant" in out
    assert out.strip().endswith(" passed")
    assert err.endswith(f"wrote {file}\n")
    assert "silu_and_mul:batch_invariant passed: " in err
    issued = json.loads(file.read_text(encoding="utf-8"))
    assert {result["op"] for result in issued["results"]} == {"silu_and_mul"}


def test_a_certificate_named_xz_is_compressed(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json.xz"
    code, _, _ = run("--op", "relu2", "--provider", "native", *QUICK, "--certificate", file)
    assert code == 0
    issued = json.loads(lzma.decompress(file.read_bytes()))
    assert [result["op"] for result in issued["results"]] == ["relu2"]


def test_json_is_the_certificate(run: Run) -> None:
    code, out, _ = run("--op", "relu2", "--provider", "native", *QUICK, "--json", "--seed", "5")
    issued = json.loads(out)
    assert (code, issued["seed"]) == (0, 5)
    assert [result["status"] for result in issued["results"]] == ["passed"]


def test_a_wrong_implementation_is_red(run: Run) -> None:
    broken = next(specimen for specimen in ZOO if specimen.name == "mutates_its_input")
    with broken.registered():
        code, out, _ = run("--op", "silu_and_mul", "--provider", "broken", *QUICK, "--in-process")
    assert code == 1
    assert "✗ silu_and_mul:broken mutation: wrote into x" in out
    assert "1 failed" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--op", "rms_nrom"), "Did you mean 'rms_norm'"),
        (("--provider", "nobody"), "no implementation from 'nobody'"),
        (("--check", "value"), "Did you mean 'values'"),
        (("--platform", "gpu"), "unknown platform 'gpu'"),
        (("--import", "no_such_module"), "--import 'no_such_module' failed"),
        (("--import", ""), "--import '' is not the name of a module"),
        (("--import", "./x.py"), "--import './x.py' is not the name of a module"),
        (("--certificate", "no/such/folder/file.json"), "no directory"),
        (("--json", "--certificate", "-"), "standard output"),
        (("--seed", "many"), "seed"),
        (("--timeout", "0"), "--timeout 0 should be a positive number of seconds"),
        (("--input", "hidden=8"), "an option 'hidden'. Did you mean 'hidden_size'"),
        (("--input", "hidden_size=-8"), "it should be a number of at least 0"),
        (("--input", "hidden_size"), "it should be a number of at least 0"),
    ],
)
def test_bad_input_ends_in_one_line(run: Run, arguments: tuple[str, ...], named: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("opweave: ")
    assert err.count("\n") == 1
    assert named in err


KERNELS = """
import torch
from opweave import ir

@ir.ops.silu_and_mul.register_impl("mine")
def silu_and_mul(x):
    d = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :d]) * x[..., d:]

@ir.ops.mul_and_silu.register_impl("mine")
def mul_and_silu(x):
    return silu_and_mul(x)
"""


def test_modules_in_the_working_directory_are_found(tmp_path: Path) -> None:
    # The installed command, whose folder is not on Python's module path.
    (tmp_path / "lies_here.py").write_text(KERNELS, encoding="utf-8")
    command = [str(Path(sys.executable).parent / "opweave"), "verify", "--op", "mul_and_silu"]
    done = subprocess.run(
        [*command, "--provider", "mine", "--import", "lies_here", "--check", "values"],
        check=False, capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert "mul_and_silu  mine      failed" in done.stdout, done.stderr


@pytest.mark.parametrize("option", ["--import", "--provider"])
@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("x = (", "SyntaxError: '(' was never closed (fails_{}.py, line 1)"),
        ("\nraise RuntimeError('no\\nway')", "RuntimeError: no way at"),
        ("import sys\nsys.exit(0)", "SystemExit: 0 at"),
        ("\nopen('/no/such/file')", "No such file or directory: '/no/such/file' at"),
        ("\nimport ctypes; ctypes.CDLL('libnosuch.so')", "OSError: libnosuch.so"),
        ("\nimport no_such_module", "No module named 'no_such_module' at"),
    ],
)
def test_modules_that_fail_end_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, source: str, named: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"fails_{option[2:]}.py").write_text(source, encoding="utf-8")
    code, out, err = run(option, f"fails_{option[2:]}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{option} 'fails_{option[2:]}' failed: " in err
    assert named.format(option[2:]) in err
    assert "SyntaxError" in err or f"fails_{option[2:]}.py:2" in err


PRINTS_AND_LEAVES = """
import sys
import torch
from opweave import ir

@ir.ops.relu2.register_impl("chatty")
def chatty(x):
    print("here I am")
    return torch.relu(x).square()

@ir.ops.relu2.register_impl("leaves")
def leaves(x):
    sys.exit(0)
"""


@pytest.mark.parametrize("where", [(), ("--in-process",)])
def test_kernels_that_print_and_that_exit(
    where: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "prints_and_leaves.py").write_text(PRINTS_AND_LEAVES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "prints_and_leaves", raising=False)
    options = ("--provider", "chatty", "--provider", "leaves", "--import", "prints_and_leaves")
    with restored(ir.ops.relu2), pytest.raises(SystemExit) as exit_:
        main(["verify", "--op", "relu2", *options, "--check", "values", "--json", *where])
    out, err = capfd.readouterr()
    statuses = {each["provider"]: each for each in json.loads(out)["results"]}
    assert exit_.value.code == 1
    assert "here I am" in err
    assert statuses["chatty"]["status"] == "passed"
    assert statuses["leaves"]["checks"][0]["problems"][0].startswith("raised SystemExit (0)")


def test_a_single_check_and_the_end_of_the_progress_bar(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "opweave.cli.output.progress_bar",
        lambda what: nullcontext(lambda done, total, item: steps.append((done, total))),
    )
    given = ("--op", "relu2", "--provider", "opweave_c", "--provider", "native", "--check", "empty")
    code, out, _ = run(*given, "--in-process")
    assert code == 0
    assert out.count(" 1 check\n") == 2, out
    assert steps[0] == (0, 2)
    assert steps[-1] == (2, 2)


def test_the_time_of_a_call_next_to_the_definition(run: Run) -> None:
    given = ("--op", "relu2", "--provider", "opweave_c", "--provider", "native", *QUICK)
    code, out, _ = run(*given)
    assert code == 0
    header, native, own = out.splitlines()[:3]
    assert "µs" in header
    assert "definition µs" in header
    assert re.search(r"\d ±\d+% +\d+\.\d ±\d+% +2 checks", own), out
    assert "±" not in native
    issued = json.loads(run(*given, "--json")[1])
    times = {r["provider"]: r["microseconds"] for r in issued["results"]}
    assert times["native"] is None
    assert times["opweave_c"] > 0
    assert "µs" not in run(*given, "--no-timing")[1]


WRONG_WHEN_LARGE = """
import torch
from opweave import ir

@ir.ops.relu2.register_impl("large")
def relu2(x):
    y = torch.relu(x).square()
    return y + 1 if len(x) == 256 else y
"""


def test_wrong_results_of_the_measured_call_are_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_when_large.py").write_text(WRONG_WHEN_LARGE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--provider", "large", "--import", "wrong_when_large", "--check", "mutation")
    with restored(ir.ops.relu2):
        code, out, _ = run("--op", "relu2", *options)
    assert code == 1
    assert "✗ relu2:large failed with 256 tokens: output 0: " in out


def test_without_a_case_nothing_is_verified(run: Run) -> None:
    code, out, _ = run("--op", "relu2", "--provider", "native", "--check", "donation")
    assert code == 1
    assert "no case for it in donation" in out
    assert out.strip().endswith("1 unverified")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package of kernels, and pytest's entry point as pyproject.toml says it."""
    (tmp_path / "mine.py").write_text(KERNELS, encoding="utf-8")
    (tmp_path / "test_own.py").write_text("def test_own(): pass", encoding="utf-8")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
    entries = project["project"]["entry-points"]["pytest11"]
    for module in entries.values():
        shutil.copytree(PACKAGE / "src" / module, tmp_path / module)
    info = tmp_path / "stand_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
    lines = [f"{name} = {module}" for name, module in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]))
    return tmp_path


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The conftest of this repository is above the sources of opweave.
    options = ("-q", "-p", "no:cacheprovider", "--noconftest", *arguments)
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return warm_python().run("-m", "pytest", *options, cwd=folder, env=env)


def test_another_package_has_it_in_pytest(package: Path) -> None:
    arguments = ("--pyargs", "opweave.conformance", "--provider", "mine", "--check", "values")
    done = pytest_in(package, *arguments)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "FAILED test_conformance.py::test_conformance[mul_and_silu:mine-values]" in done.stdout
    assert "mul_and_silu:mine fails" in done.stdout


def test_bad_options_of_the_plugin(package: Path) -> None:
    done = pytest_in(package, "--pyargs", "opweave.conformance", "--provider", "nobody")
    assert done.returncode != 0
    assert "no implementation from 'nobody'" in done.stdout


def test_nobody_else_has_the_options(package: Path) -> None:
    """Nor torch: the entry point imports nothing of opweave."""
    code = "import sys; assert not {'torch', 'opweave'} & set(sys.modules), sorted(sys.modules)"
    (package / "test_own.py").write_text(f"def test_own():\n    {code}\n", encoding="utf-8")
    fresh = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"]
    assert subprocess.run(fresh, cwd=package, check=False).returncode == 0
    assert "unrecognized arguments" in pytest_in(package, "--provider", "mine").stderr


# The page of verified implementations says what the certificate says, and no more.


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def issued() -> dict[str, Any]:
    found = subjects(["relu2"])
    return certificate([verify(subject, ["values", "empty"]) for subject in found], seed=0)


def row(page: str, op: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| `{op}` |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_every_registered_implementation_has_a_cell(hooks: Any, issued: dict[str, Any]) -> None:
    page = hooks.verified(issued)
    native, kernel = row(page, "relu2")[0], [cell for cell in row(page, "relu2")[1:] if cell]
    assert int(native) > 0
    assert int(kernel[0].replace(",", "")) > 50
    assert row(page, "rms_norm")[0] == "not yet verified"
    for subject in subjects():
        assert row(page, subject.op.name)[0]
    assert page.startswith(f"{len(issued['results'])} passed. opweave ")


@pytest.mark.parametrize("digest", ["source", "definition"])
def test_other_sources_are_not_verified(hooks: Any, issued: dict[str, Any], digest: str) -> None:
    issued["results"][1][digest] = "another"
    cells = row(hooks.verified(issued), "relu2")
    assert cells.count("passed, changed since") == 1


def test_what_failed_is_said(hooks: Any, issued: dict[str, Any]) -> None:
    issued["results"][1]["status"] = "failed"
    assert "**failed**" in row(hooks.verified(issued), "relu2")


def test_the_certificate_of_the_page_names_no_folder(hooks: Any) -> None:
    text = lzma.decompress(hooks._CERTIFICATE.read_bytes()).decode()
    assert json.loads(text)["results"]
    assert str(ROOT) not in text
    assert "/home/" not in text
    assert "## " not in hooks.on_page_markdown("<!-- certificate -->")
