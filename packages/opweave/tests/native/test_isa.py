"""The instruction set is chosen at load, and a bad choice is an error, not a crash."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from support import ROOT
from support.fixtures import FreshPython
from support.warm_python import warm_python

from .conftest import ISAS
from .oracle import DTYPES

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


# Levels that differ only in their tuning give the same results, bit for bit.

TUNED = {"zen4": "avx512bf16"}
OPS = sorted(
    name
    for name, op in ir.current_registry().ops.items()
    if "opweave_c" in op.impls and name != "advance_step_flashattn"
)  # of integers
# One row is prefetched ahead, or two; one step of vectors, or several and a rest.
SIZES: tuple[dict[str, int], ...] = ({}, {"num_tokens": 5, "hidden_size": 1096})
WHOLE_BLOCKS = {"linear_q": 1280}  # which hidden_size has to be


def results(op: IrOp, size: dict[str, int], dtype: torch.dtype) -> list[Tensor]:
    """Run *op* on inputs that depend only on these arguments; return what it wrote, too."""
    torch.manual_seed(7)
    known = inspect.signature(op.input_generator).parameters
    if "hidden_size" in size and op.name in WHOLE_BLOCKS:
        size = {**size, "hidden_size": WHOLE_BLOCKS[op.name]}
    size = {name: value for name, value in size.items() if name in known}
    given: Any = op.generate_inputs(**size, dtype=dtype)
    given = given if isinstance(given, tuple) else (given,)
    returned = op.impls["opweave_c"].impl_fn(*given)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [value for value in (*given, *returned) if isinstance(value, Tensor)]


@pytest.mark.parametrize("tuned", TUNED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_tuning_does_not_change_results(
    module: ModuleType, isas: tuple[str, ...], name: str, dtype: torch.dtype, tuned: str
) -> None:
    if not {tuned, TUNED[tuned]} <= {*isas}:
        pytest.skip(f"{tuned} and {TUNED[tuned]} are not both compiled, or not supported")
    op = getattr(ir.ops, name)
    for size in SIZES:
        found = []
        for isa in (tuned, TUNED[tuned]):
            module._select_isa(isa)
            found.append(results(op, size, dtype))
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(
                mine.view(torch.uint8), other.view(torch.uint8), rtol=0, atol=0
            )


def test_a_tuned_level_comes_first_on_its_vendors_cpus_only() -> None:
    if not {"zen4", "avx512bf16"} <= {*ISAS}:
        pytest.skip("zen4 and avx512bf16 are not both compiled, or not supported")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        is_amd = "AuthenticAMD" in file.read()
    assert (ISAS.index("zen4") < ISAS.index("avx512bf16")) == is_amd
    assert ISAS[-1] == "base"


# Everything works without the parts of torch that it does not document, and if they change.

# The results of both call paths and of the eager fast path, and the errors of lazy tensors.
CALLS = """
import torch
from opweave import _C_ops, _custom_ops, ir, native
assert native.status().available and native.status().fast_call, native.status()
with torch.no_grad():
    x, weight = torch.randn(5, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    wanted = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
    for call in (_C_ops.rms_norm, torch.ops.opweave_c.rms_norm, _custom_ops.rms_norm):
        for scale in (weight, torch.nn.Parameter(weight)):
            out = torch.empty_like(x)
            call(out, x, scale, 1e-6)
            torch.testing.assert_close(out, wanted)
    with ir.priority(rms_norm=["opweave_c!"]):
        torch.testing.assert_close(ir.ops.rms_norm(x, weight, 1e-6), wanted)
        strided = torch.cat((x, x), dim=1)[:, :64]
        torch.testing.assert_close(ir.ops.rms_norm(strided, weight, 1e-6), wanted)
    lazy = torch.zeros(5, 64, dtype=torch.complex64).conj().imag
    for refused in (lazy, x.to_sparse()):
        try:
            _C_ops.rms_norm(torch.empty(5, 64), refused, None, 1e-6)
        except TypeError:
            continue
        raise SystemExit(f"a direct call accepted {refused.layout}, {refused.is_neg()}")
with torch.enable_grad():
    y = ir.ops.rms_norm(x.float().requires_grad_(), None, 1e-6)
    assert y.requires_grad
"""
# torch moves the tensor in its Python object: Tensor._cdata disagrees with every word of it.
MOVED = """
import ctypes, torch
elsewhere = (ctypes.c_size_t * 4)()
torch.Tensor._cdata = property(lambda self: ctypes.addressof(elsewhere))
"""
CHECK = """
from opweave.native.loader import plain_check
assert _C_ops._reads_tensors_directly() is {direct}
assert (plain_check() is not None) is {checks}
"""


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_switched_off(fresh_python: FreshPython, value: str) -> None:
    code = CALLS + CHECK.format(direct=False, checks=False)
    fresh_python(code, env={"OPWEAVE_NATIVE_TORCH_INTERNALS": value})


@pytest.mark.parametrize("env", [{}, {"OPWEAVE_NATIVE_TORCH_INTERNALS": "1"}], ids=str)
def test_in_use(fresh_python: FreshPython, env: dict[str, str]) -> None:
    fresh_python(CALLS + CHECK.format(direct=True, checks=True), env=env)


def test_a_failing_self_test_switches_it_off(fresh_python: FreshPython) -> None:
    fresh_python(MOVED + CALLS + CHECK.format(direct=False, checks=True))
