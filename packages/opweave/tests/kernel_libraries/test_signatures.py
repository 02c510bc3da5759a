"""Calls of adapters against the signatures of the installed libraries, which are not imported.

The signatures are read from the source, because most of these libraries need a GPU to be imported.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from opweave import ir
from opweave.ir import IrOpImpl
from opweave.ir.schema import ADAPTERS
from opweave.kernels.wrap import ModuleFunction, Wrapped

WRAPPED = [
    (impl, wrapped, function)
    for op in ir.current_registry().ops.values()
    for impl in op.impls.values()
    if (wrapped := Wrapped.by(impl)) is not None
    for function in wrapped.named()
]
PACKAGES = {function.name.partition(".")[0] for _, _, function in WRAPPED}
REQUIRED = {"flag_gems", "flashinfer", "liger_kernel", "quack"}  # requirements.txt
LARGE = {"flash_attn", "sgl_kernel"}  # requirements-large.txt


def signature_of(function: ModuleFunction) -> inspect.Signature:
    file = function.file()
    assert file is not None, f"{function.name}: no such module"
    name = function.name.partition(":")[2]
    found = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1, f"{file} does not define {name}"
    return _signature(found[0])


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    arguments = node.args
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
    same = ast.Lambda(arguments, ast.Constant(None))
    function = eval(compile(ast.fix_missing_locations(ast.Expression(same)), "<ast>", "eval"))
    return inspect.signature(function)


def bind(wrapped: Wrapped, function: ModuleFunction) -> None:
    """Raise TypeError if the arguments do not fit the parameters of *function*."""
    given, signature = wrapped.arguments, signature_of(function)
    if isinstance(given, Mapping):
        signature.bind(**given)
    else:
        signature.bind(*given)


def test_every_library_is_checked() -> None:
    assert PACKAGES >= REQUIRED
    assert PACKAGES <= REQUIRED | LARGE
    assert {each for each in LARGE if find_spec(each)} <= PACKAGES
    assert {impl.provider for impl, _, _ in WRAPPED} <= {*ADAPTERS}


@pytest.mark.parametrize(
    ("impl", "wrapped", "function"),
    WRAPPED,
    ids=[f"{impl.op.name}:{function.name}" for impl, _, function in WRAPPED],
)
def test_the_call_fits(impl: IrOpImpl, wrapped: Wrapped, function: ModuleFunction) -> None:
    assert function.obstacle() is None
    bind(wrapped, function)


def test_no_library_is_imported() -> None:
    assert not PACKAGES & sys.modules.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "missing a required argument: 'weight'"),
        (["x", "weight", 1e-6, None], "too many positional arguments"),
        ({"x": "x", "weight": "weight", "epsilon": 1e-6}, "unexpected keyword argument 'epsilon'"),
    ],
)
def test_a_call_that_does_not_fit(
    arguments: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_norms").mkdir()
    (tmp_path / "acme_norms" / "__init__.py").write_text("raise ImportError('no GPU')")
    code = "def norm(x: Tensor, weight: Tensor, eps: float = EPSILON, *, out=None): ..."
    (tmp_path / "acme_norms" / "rms.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    function = ModuleFunction("acme_norms.rms:norm")
    bind(Wrapped(function, ["x", "weight", 1e-6]), function)
    with pytest.raises(TypeError, match=message):
        bind(Wrapped(function, arguments), function)
    with pytest.raises(AssertionError, match="does not define sum"):
        signature_of(ModuleFunction("acme_norms.rms:sum"))
