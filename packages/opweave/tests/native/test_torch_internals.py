"""Everything works without the parts of torch that it does not document, and if they change."""

from __future__ import annotations

import pytest

from support.fixtures import FreshPython

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
