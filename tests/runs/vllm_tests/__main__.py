"""Run vLLM's own tests of its IR, custom ops, compiler passes and plugins against opweave.

    make test-vllm-own
    python tests/runs/vllm_tests --only tests/ir       # some of the files
    python tests/runs/vllm_tests --verbose             # with the errors of all failed tests

The tests come from vLLM's source distribution, at the URL that ``build/vllm-tests/pylock.toml``
contains. They run unchanged, without vLLM: its modules are opweave's, see ``modules.py``. Tests
that need a GPU are skipped.

The exit status is 1 if a test fails that ``differences.txt`` does not list, or if a listed test
passes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from runs.vllm_tests.outcomes import Outcomes, compare, known_differences, read, table
from runs.vllm_tests.sources import PLUGIN, unpack

TESTS = Path(__file__).parents[2]
BUILD = TESTS.parent / "build" / "vllm-tests"
# The files of each process: the tests of the IR declare ops, and the plugin replaces a layer.
SESSIONS = (
    ("tests/ir/test_inplace_op.py", "tests/ir/test_op.py"),
    ("tests/kernels/ir/test_activation.py", "tests/kernels/ir/test_ir_ops.py",
     "tests/model_executor/test_enabled_custom_ops.py",
     "tests/compile/passes/ir/test_clone_cleanup.py",
     "tests/compile/passes/ir/test_inplace_functionalization.py",
     "tests/compile/passes/ir/test_lowering.py", "tests/compile/passes/test_noop_elimination.py",
     "tests/compile/passes/test_pass_manager.py",
     "tests/compile/passes/test_scatter_split_replace.py",
     "tests/compile/passes/test_split_coalescing.py"),
    ("tests/plugins_tests/test_platform_plugins.py",),
)  # fmt: skip


def run(folder: Path, files: Sequence[str], verbose: bool) -> Outcomes:
    """Run tests of *folder* in a process of their own."""
    results = BUILD / "results.json"
    results.unlink(missing_ok=True)
    uses_plugin = any(file.startswith("tests/plugins_tests/") for file in files)
    packages = [folder / PLUGIN] if uses_plugin else []
    path = [str(each) for each in (folder, *packages, TESTS)]
    variables = {
        "OMP_NUM_THREADS": "1",
        "OPWEAVE_PLATFORM": "cpu",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")])),
        "VLLM_TESTS_RESULTS": str(results),
    }
    command = [
        *(sys.executable, "-m", "pytest", "--config-file", os.devnull, "--rootdir", str(folder)),
        *("--noconftest", "-p", "no:cacheprovider", "-p", "runs.vllm_tests.plugin"),
        "--continue-on-collection-errors",
        *("--quiet", "--tb", "short" if verbose else "no", *files),
    ]
    output = None if verbose else subprocess.DEVNULL
    subprocess.run(command, cwd=folder, env=variables, stdout=output, check=False)
    if not results.exists():
        raise SystemExit("pytest did not run the tests: see its output with --verbose")
    return read(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="FILE", help="the files to run")
    parser.add_argument("--verbose", action="store_true", help="print pytest's output")
    given = parser.parse_args()
    folder = unpack(BUILD / "pylock.toml", BUILD)
    outcomes: Outcomes = {}
    for session in SESSIONS:
        files = [file for file in session if file.startswith(tuple(given.only or [""]))]
        if files:
            outcomes |= run(folder, files, given.verbose)
    known = known_differences(Path(__file__).with_name("differences.txt"))
    problems = compare(outcomes, known, complete=given.only is None)
    print(*table(outcomes), *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
