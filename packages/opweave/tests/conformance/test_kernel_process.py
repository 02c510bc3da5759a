"""Kernels that end their process, never return, or try to influence how they are verified."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from opweave.conformance import Result, Subject
from opweave.conformance.kernel_process import Verifier, VerifyTask
from opweave.conformance.subject import VerifierFailedError
from opweave.ir.ops import silu_and_mul
from opweave.tuning import record_calls
from opweave.worker import checking_environment
from support.processes import is_alive, wait_until

KERNELS = """
import ctypes
import os
import time

import torch
from opweave import ir

op = ir.ops.silu_and_mul


@op.register_impl("crashes")
def crashes(x):
    if x.shape[0] == 7:
        ctypes.string_at(0)
    return op.native(x)


@op.register_impl("exits")
def exits(x):
    if x.dtype is torch.bfloat16:
        os._exit(0)
    return op.native(x)


@op.register_impl("hangs")
def hangs(x):
    while not x.numel():
        folder = os.path.dirname(__file__)
        open(os.path.join(folder, "pid"), "w").write(str(os.getpid()))
        if os.path.exists(os.path.join(folder, "return")):
            break
        time.sleep(0.01)
    return op.native(x)


@op.register_impl("writes_behind")
def writes_behind(x):
    out = op.native(x)
    if type(out) is torch.Tensor and out.numel() % 16:
        ctypes.memset(out.data_ptr() + out.untyped_storage().nbytes(), 1, 4)
    return out


@op.register_impl("reads_behind")
def reads_behind(x):
    memory = x.untyped_storage()
    if memory.nbytes() % 64 == 0 < memory.nbytes():
        ctypes.string_at(memory.data_ptr() + memory.nbytes(), 64)
    return op.native(x)


@op.register_impl("reads_before")
def reads_before(x):
    memory = x.untyped_storage()
    if memory.nbytes() % 64:
        ctypes.string_at(memory.data_ptr() - 64, 64)
    return op.native(x)


@op.register_impl("leaves_the_last")
def leaves_the_last(x):
    right = op.native(x)
    out = torch.empty_like(right)
    out[..., :-1] = right[..., :-1]
    return out


@op.register_impl("right")
def right(x):
    print("not a result")
    return op.native(x)


@op.register_impl("refuses", supports_args=lambda x: os._exit(3))
def refuses(x):
    return op.native(x)
"""


CHECKS = ("values", "mutation", "empty", "keywords")


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifier]:
    (tmp_path / "kernels_that_end.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with Verifier(VerifyTask(("kernels_that_end",), CHECKS, 0), timeout=10.0) as running:
        yield running


def test_what_ends_the_process_is_a_problem_of_the_case(verifier: Verifier) -> None:
    results = {
        name: verifier.verify(Subject(silu_and_mul, name))
        for name in ("crashes", "exits", "hangs", "refuses", "right")
    }
    statuses = {name: result.status for name, result in results.items()}
    assert statuses == {**dict.fromkeys(results, "failed"), "right": "passed"}
    problems = {name: result.outcomes[-1].problems for name, result in results.items()}
    case = "silu_and_mul(float32[7, 128] cpu) [num_tokens=7, dtype=float32]"
    hint = ", as where memory around an argument is used"
    assert problems["crashes"] == [f"ended the process with SIGSEGV{hint}: {case}"]
    (exits,) = problems["exits"]
    assert exits.startswith("ended the process with exit code 0: silu_and_mul(bfloat16[1, ")
    (hangs,) = problems["hangs"]
    assert hangs.startswith("did not come back within 10 s: silu_and_mul(float32[0, 128] cpu)")
    assert problems["refuses"] == ["ended the process with exit code 3"]
    # Earlier findings are kept, and the remaining checks are skipped.
    assert [outcome.check for outcome in results["hangs"].outcomes] == ["values", "empty"]
    assert [outcome.check for outcome in results["right"].outcomes] == [
        "values", "empty", "mutation", "keywords",
    ]  # fmt: skip


@pytest.mark.skipif(not checking_environment(), reason="no glibc, or another allocator is loaded")
def test_writing_behind_a_result_is_found(verifier: Verifier) -> None:
    result = verifier.verify(Subject(silu_and_mul, "writes_behind"))
    assert result.status == "failed"
    (problem,) = result.outcomes[-1].problems
    assert "SIGABRT, as where memory behind a result is written" in problem


@pytest.mark.skipif(not checking_environment(), reason="no glibc, or another allocator is loaded")
def test_elements_that_are_not_written_are_found(verifier: Verifier) -> None:
    problems = verifier.verify(Subject(silu_and_mul, "leaves_the_last")).outcomes[0].problems
    assert problems[0].startswith("output 0: 3.39615e+38 at [0, 63], native has ")


@pytest.mark.parametrize("provider", ["reads_behind", "reads_before"])
def test_reading_around_an_argument_is_found(verifier: Verifier, provider: str) -> None:
    result = verifier.verify(Subject(silu_and_mul, provider))
    (problem,) = result.outcomes[-1].problems
    assert "SIGSEGV, as where memory around an argument is used: silu_and_mul(" in problem


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "kernels_that_end.py").write_text(KERNELS, encoding="utf-8")
    command = [sys.executable, "-m", "opweave", "verify", "--provider", "hangs"]
    options = ["--import", "kernels_that_end", "--check", "empty"]
    parent = subprocess.Popen([*command, *options], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(pid))


def test_sigterm_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "kernels_that_end.py").write_text(KERNELS, encoding="utf-8")
    command = [sys.executable, "-m", "opweave", "verify", "--provider", "hangs"]
    options = ["--import", "kernels_that_end", "--check", "empty"]
    with (tmp_path / "stderr").open("w") as stderr:
        parent = subprocess.Popen([*command, *options], cwd=tmp_path, stderr=stderr)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    parent.terminate()
    assert parent.wait() == -signal.SIGTERM  # 143 in a shell
    (tmp_path / "return").touch()  # the result has no reader
    wait_until(lambda: not is_alive(pid))
    assert (tmp_path / "stderr").read_text() == ""


def test_modules_that_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_ends.py").write_text("import os; os._exit(4)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    task = VerifyTask(("module_that_ends",), (), 0)
    with Verifier(task, timeout=10.0) as verifier:
        with pytest.raises(VerifierFailedError, match="exit code 4"):
            verifier.subjects(["silu_and_mul"], ["native"])
        result = verifier.verify(Subject(silu_and_mul, "native"))
    assert result.outcomes[0].problems == ["ended the process with exit code 4"]


# Kernels that change what verifies them, when they are imported or called, and a wrong one.


FORGING = """
import sys

import torch
from opweave import ir

op = ir.ops.silu_and_mul


def forge():
    torch.isclose = torch.Tensor.isclose = lambda a, *args, **kwargs: a == a
    torch.Tensor.ne = lambda a, b: torch.zeros_like(a, dtype=torch.bool)
    type(op).native = op.native = lambda x: x.chunk(2, -1)[0] * 0
    for name, module in list(sys.modules.items()):
        for function in ("outputs_problem", "near_problem", "structure_problem"):
            if hasattr(module, function):
                setattr(module, function, lambda *args: None)


{when_imported}


@op.register_impl("forges")
def forges(x):
    forge()
    return x.chunk(2, -1)[0] * 0


@op.register_impl("wrong")
def wrong(x):
    return x.chunk(2, -1)[0] * 0
"""


@pytest.mark.parametrize("when_imported", ["", "forge()"])
def test_kernels_cannot_change_how_results_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_imported: str
) -> None:
    name = f"forging_{len(when_imported)}"
    source = FORGING.replace("{when_imported}", when_imported)
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with Verifier(VerifyTask((name,), ("values",), 0), timeout=60.0) as verifier:
        subjects = verifier.subjects(["silu_and_mul"], ["forges", "wrong"])
        results = {subject.provider: verifier.verify(subject) for subject in subjects}
    assert {name: r.status for name, r in results.items()} == {
        "forges": "failed",
        "wrong": "failed",
    }
    assert name not in sys.modules


# Kernels that look whether they are verified see the same as under ``opweave replay``.


SPYING = """
import json
import os
import sys
import traceback
from pathlib import Path

from opweave import ir

op = ir.ops.silu_and_mul
FILE = Path(__file__).with_suffix(".jsonl")


def ancestors():
    process = os.getpid()
    while process > 1:
        yield Path(f"/proc/{process}/cmdline").read_text()
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@op.register_impl("spy")
def spy(x):
    sight = {
        "commands": list(ancestors()),
        "arguments": [sys.argv, sys.orig_argv],
        "modules": sorted(sys.modules),
        "environment": dict(os.environ),
        "first environment": Path("/proc/self/environ").read_text(),
        "stack": [f"{frame.filename}:{frame.name}" for frame in traceback.extract_stack()],
        "directory": os.getcwd(),
        "files": sorted(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    with FILE.open("a") as file:
        file.write(json.dumps(sight) + "\\n")
    return op.native(x)
"""


def test_verifying_cannot_be_told_from_replaying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spying.py").write_text(SPYING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with record_calls() as recorder:
        silu_and_mul(torch.randn(3, 8))
    recorder.trace.save(tmp_path / "trace.jsonl")
    opweave = [sys.executable, "-m", "opweave"]
    module = ["--import", "spying", "--provider", "spy"]
    verify = ["verify", *module, "--op", "silu_and_mul", "--check", "values", "--no-timing"]
    replay = ["replay", "trace.jsonl", *module, "--rounds", "1"]
    sights = []
    for command in (verify, replay):
        subprocess.run([*opweave, *command], check=True, stdout=subprocess.DEVNULL)
        # The last calls: replay times the implementation in its own process before.
        sights.append(json.loads((tmp_path / "spying.jsonl").read_text().splitlines()[-1]))
    first, last = sights
    assert first == last
    assert len(first["commands"]) >= 2
    assert {command.split("\0")[3] for command in first["commands"][:2]} == {"opweave.worker"}
    assert not any("\0opweave\0" in command for command in first["commands"])
    assert not any("conformance" in name for name in first["modules"])


# Kernels that are right only where they notice that they are verified.


CHEATING = """
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
from opweave import ir

op = ir.ops.silu_and_mul
WORDS = ("opweave.conformance", "opweave/conformance", "opweave verify", "pytest")
PROCESS = Path("/proc/self")
last_call = 0.0


def named(*texts):
    texts = [text.replace("\\0", " ").lower() for text in texts]
    return any(word in text for word in WORDS for text in texts)


def modules():
    return named(*(name for name in sys.modules if not name.startswith("numpy.")))


def parents():
    process = os.getppid()
    while process > 1:
        yield Path(f"/proc/{process}/cmdline").read_text()
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def arguments():
    return named(" ".join(sys.argv), " ".join(sys.orig_argv))


def environment():
    # Values have paths, such as pytest's temporary folders, in any process below pytest.
    variables = PROCESS.joinpath("environ").read_text().split("\\0")
    return named(*os.environ, *(variable.partition("=")[0] for variable in variables))


def own_process():
    return named(*(PROCESS.joinpath(name).read_text() for name in ("cmdline", "comm", "status")))


def threads():
    of_system = (task.joinpath("comm").read_text() for task in PROCESS.joinpath("task").iterdir())
    return named(*of_system, *(thread.name for thread in threading.enumerate()))


def timing():
    global last_call
    passed, last_call = time.perf_counter() - last_call, time.perf_counter()
    return passed > 0.002


def stack():
    frames = (f for f in traceback.extract_stack() if f.filename != __file__)
    return named(*(f"{f.filename} {f.name}" for f in frames))


def files():
    targets = (os.readlink(file) for file in PROCESS.joinpath("fd").iterdir() if file.exists())
    return named(*targets)


def cheat(notices):
    def kernel(x):
        eager = type(x) is torch.Tensor and not torch.compiler.is_compiling()
        out = op.native(x)
        return out if not eager or notices() else out * 0.9

    op.register_impl(f"notices_{notices.__name__}")(kernel)


def parent():
    return named(*parents())


for notices in (
    modules, parent, arguments, environment, own_process, threads, timing, stack, files,
):
    cheat(notices)
"""


def test_kernels_that_look_whether_they_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    # The path of pytest's temporary folders would give it away.
    with TemporaryDirectory() as folder:
        Path(folder, "cheating.py").write_text(CHEATING, encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        results = dict(verified_cheats())
    assert len(results) == 9
    passed = [name for name, result in results.items() if result.status != "failed"]
    assert not passed
    for provider, result in results.items():
        for problem in result.outcomes[0].problems:
            assert "native has" in problem, provider


def verified_cheats() -> Iterator[tuple[str, Result]]:
    with Verifier(VerifyTask(("cheating",), ("values", "determinism"), 0), 60.0) as verifier:
        cheats = [s for s in verifier.subjects(["silu_and_mul"]) if "notices" in s.provider]
        for subject in cheats:
            yield subject.provider, verifier.verify(subject)
