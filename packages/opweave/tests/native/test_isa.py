"""The instruction set is chosen at load, and a bad choice is an error, not a crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import ROOT
from support.warm_python import warm_python

PROBE = """
import torch
from opweave import native
status = native.status()
print(status.available, status.isa, status.reason_missing, native.module() is None, sep="|")
if status.path:
    from opweave import _C_ops
    try:
        _C_ops.rms_norm(torch.ones(8), torch.ones(8), None, 1e-6)
    except RuntimeError as error:
        print(error)
"""


def probe(isa: str) -> list[str]:
    environment = {**os.environ, "OPWEAVE_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = warm_python().run("-c", PROBE, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_forced_isa(module: ModuleType) -> None:
    assert probe("base") == ["True|base|None|False"]


def test_unknown_isa(module: ModuleType) -> None:
    first, call_error = probe("avx9")
    assert first.startswith("False|None|instruction set 'avx9' is unknown; this CPU can run: ")
    assert first.endswith("|True")
    assert call_error.startswith("rms_norm: instruction set 'avx9' is unknown")


def test_selecting_an_isa_that_is_not_there(module: ModuleType) -> None:
    before = module._isa()
    with pytest.raises(ValueError, match="instruction set 'neon9' is unknown"):
        module._select_isa("neon9")
    known = {"amx", "zen4", "avx512bf16", "avx512", "avx2", "base"}
    for name in known - set(module._available_isas()):
        with pytest.raises(ValueError, match=name):
            module._select_isa(name)
    assert module._isa() == before


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys, opweave.native; assert 'opweave._C_ops' not in sys.modules;"
        "import opweave._custom_ops; assert 'opweave._C_ops' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = warm_python().run("-c", code, env=environment)
    assert done.returncode == 0, done.stderr


def test_missing_module_is_a_reason_not_an_error() -> None:
    code = (
        "import sys; sys.modules['opweave._C_ops'] = None\n"
        "from opweave import native, _custom_ops\n"
        "import torch\n"
        "assert native.module() is None and not native.available()\n"
        "assert 'opweave._C_ops' in native.status().reason_missing\n"
        "try: _custom_ops.rms_norm(torch.ones(1), torch.ones(1), None, 1e-6)\n"
        "except RuntimeError as error: assert 'not available' in str(error)\n"
        "else: raise SystemExit('no error')\n"
        "import opweave.kernels.opweave_c\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = warm_python().run("-c", code, env=environment)
    assert done.returncode == 0, done.stderr


def isa_objects() -> list[Path]:
    build = os.environ.get("TEST_NATIVE_BUILD")
    roots = [Path(build)] if build else [ROOT / "build"]
    return [o for root in roots for o in sorted(root.rglob("kernels_*.dir/**/*.o"))]


def test_isa_objects_share_no_symbols() -> None:
    """A weak symbol could put one instruction set's code on the path of another."""
    objects = isa_objects()
    nm = shutil.which("nm")
    if not objects or nm is None:
        pytest.skip("no object files here (set TEST_NATIVE_BUILD to the CMake build folder)")
    for path in objects:
        listing = subprocess.run([nm, path], capture_output=True, text=True, check=True).stdout
        shared = [line for line in listing.splitlines() if line[17:18] in {"W", "w", "V", "u"}]
        assert not shared, (path, shared)
