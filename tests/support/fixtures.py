"""Fixtures of all tests: reproducible random inputs, isolation, new interpreters."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings

import support.hypothesis_profiles  # noqa: F401 - registers the profiles
from opweave import ir
from opweave.ir.scope import current_scope
from support.process_globals import restored
from support.warm_python import warm_python

SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(2**31)))

# Workers of pytest-xdist take over the seed. They get a width too, which consoles would read once.
os.environ["TEST_SEED"] = str(SEED)
os.environ.pop("COLUMNS", None)
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is not a directory is not asked for on the hub
# In every new cache, Inductor compiles and loads a program for each instruction set of the CPU, to
# know that the compiler has it too: 12 s of the 19 s that a first graph takes.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Tests of a GPU ask for it; all others are about the CPU.
if torch.cuda.device_count():
    os.environ.setdefault("OPWEAVE_PLATFORM", "cpu")

settings.load_profile("opweave")

# Runs each piece of code in a child of one interpreter that has imported torch and opweave and
# used nothing yet: as good as a fresh interpreter, and a hundred times quicker.
_FORKS = """
    import json, os, sys, traceback
    import torch
    from opweave import ir

    for case in json.load(sys.stdin):
        os.makedirs(case["name"])
        if not (child := os.fork()):
            sys.stderr = open(case["name"] + ".err", "w")
            os.chdir(case["name"])
            for path, text in case["files"].items():
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                with open(path, "w") as file:
                    file.write(text)
            os.environ.update(case["env"])
            failed = True
            try:
                exec(case["code"], {"ir": ir, "torch": torch, "os": os})
                failed = False
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(failed)
        _, status = os.waitpid(child, 0)
        with open(case["name"] + ".err") as file:
            print(json.dumps([case["name"], status, file.read()]))
"""

FreshPython = Callable[..., "subprocess.CompletedProcess[str]"]
FreshCases = Callable[[Sequence["Case"]], None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def pytest_report_header() -> str:
    return f"inputs: TEST_SEED={SEED}"


def pytest_collection_finish() -> None:
    """Exclude modules and tests, which live until the end, from garbage collection.

    Each of its passes over all objects takes half a second otherwise.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Give each test inputs of its own, new in every run; ``TEST_SEED`` brings a run back."""
    torch.manual_seed(SEED + zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves a registry, a scope, a mode or a default behind."""
    registry, dtype, grad = ir.current_registry(), torch.get_default_dtype(), _grad_modes()
    yield
    assert ir.current_registry() is registry
    assert current_scope() is None
    assert torch.get_default_dtype() is dtype
    assert _grad_modes() == grad


@pytest.fixture(autouse=True)
def _process_globals() -> Iterator[None]:
    """Restore what a test, above all one that runs the command line, sets for the process."""
    with restored():
        yield


def _grad_modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.fixture
def registry() -> Iterator[ir.Registry]:
    """An empty registry that is the current one during the test."""
    with ir.isolated_registry() as fresh:
        yield fresh


@pytest.fixture
def fresh_python(tmp_path: Path) -> FreshPython:
    """Run code in a new process, in an empty folder, without any setting of opweave.

    ``fresh_python(code, env={...}, check=True)`` returns the completed process. It has imported
    torch and its compilers before (see :mod:`warm_python`), except with ``warm=False``.
    """

    def run(
        code: str,
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        stdin: str | None = None,
        warm: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("OPWEAVE_")}
        clean["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        clean.update(env or {})
        if warm:
            process = warm_python().run(
                "-c", textwrap.dedent(code), cwd=tmp_path, env=clean, stdin=(stdin or "").encode()
            )
        else:
            process = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(code)],
                env=clean,
                cwd=tmp_path,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
        if check:
            assert process.returncode == 0, process.stderr
        return process

    return run


class Case(NamedTuple):
    """Code to run in a fresh process, with environment variables and files of its own."""

    code: str
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


@pytest.fixture
def fresh_cases(fresh_python: FreshPython) -> FreshCases:
    """Run each case in a fresh process that has imported ``ir`` and ``torch``; none may raise."""

    def run(cases: Sequence[Case]) -> None:
        described = [
            {
                "name": f"case_{i}",
                "code": textwrap.dedent(case.code),
                "env": dict(case.env),
                "files": dict(case.files),
            }
            for i, case in enumerate(cases)
        ]
        process = fresh_python(_FORKS, stdin=json.dumps(described))
        results = [json.loads(line) for line in process.stdout.splitlines()]
        assert len(results) == len(cases)
        failed = [
            f"{case}\n{stderr}"
            for case, (_, status, stderr) in zip(cases, results, strict=True)
            if status
        ]
        assert not failed, "\n\n".join(failed)

    return run
