"""Loading of ``opweave._C_ops``, once, and its status."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opweave import plain_call, torch_compat
from opweave.native.calls import Function, callable_of, open_call_paths

NAMESPACE = "opweave_c"
"""The ops are ``torch.ops.opweave_c.<op>``."""


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """The status of the native module in this process.

    Attributes:
        available: whether it has a usable instruction set, and torch ops, which graphs need.
        reason_missing: why it is not available, or None.
        isa: the instruction set in use.
        isa_levels: the instruction sets that this CPU supports, best first.
        fast_call: whether ``_C_ops.<op>`` may be called directly.
        torch_ops: whether ``torch.ops.opweave_c`` has the ops.
        path: the module's file.
    """

    available: bool = False
    reason_missing: str | None = None
    isa: str | None = None
    isa_levels: tuple[str, ...] = ()
    fast_call: bool = False
    torch_ops: bool = False
    path: str | None = None


def module() -> ModuleType | None:
    """Return ``opweave._C_ops``, or None if it cannot be used (see `status`).

    The first call imports the module and opens both call paths. Never raises.
    """
    return _loaded()[0]


def require() -> ModuleType:
    """Return ``opweave._C_ops``.

    Raises:
        RuntimeError: it cannot be used.
    """
    raw, loaded = _loaded()
    if raw is None:
        raise RuntimeError(
            f"The native ops are not available: {loaded.reason_missing}. "
            "opweave.ir.ops run without them."
        )
    return raw


require._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see calls.py


@functools.cache
def native_op(op: str, *, in_kernel: bool = False) -> Function:
    """Return *op* of ``opweave._C_ops`` as a function (see `callable_of`).

    The function raises RuntimeError if the module cannot be used, or lacks the op.
    """
    if module() is None:
        return lambda *arguments: require()  # raises
    if not has_native_op(op):
        return partial(_fail_without, op)
    direct = status().fast_call
    return callable_of(op, require(), NAMESPACE, direct=direct, in_kernel=in_kernel)


def has_native_op(op: str) -> bool:
    """Whether the module has *op*; one that was built from older sources may not."""
    raw = module()
    return raw is not None and hasattr(raw, op)


def _fail_without(op: str, *arguments: object) -> None:
    raise RuntimeError(
        f"The native module has no op {op!r}: {status().path} was built from older sources. Build "
        "it again with 'make run'."
    )


def available() -> bool:
    """Whether the native ops can be used."""
    return status().available


def status() -> NativeStatus:
    """Return the status of the native module, loading it first if necessary."""
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[ModuleType | None, NativeStatus]:
    try:
        raw: Any = importlib.import_module("opweave._C_ops")
    except ImportError as error:
        return None, NativeStatus(reason_missing=_import_failure(error))
    fast_call, problem = open_call_paths(raw, NAMESPACE)
    reason = raw._isa_error() or problem
    native_status = NativeStatus(
        available=reason is None,
        reason_missing=reason,
        isa=raw._isa(),
        isa_levels=raw._available_isas(),
        fast_call=fast_call,
        torch_ops=problem is None,
        path=raw.__file__,
    )
    return (raw if native_status.available else None), native_status


def _import_failure(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "opweave._C_ops":
        return "opweave._C_ops is not built; reinstall opweave with a C++ compiler installed"
    return f"opweave._C_ops does not load: {error}"


# The native check whether a call may bypass torch's dispatcher, with a self-test before use.


def plain_check() -> Callable[..., int] | None:
    """Return the native check (see :func:`opweave.ir.codegen.use_plain_check`), or None.

    None if there is no native module, if torch lacks a symbol that it needs, or if the self-test
    fails.
    """
    raw = module()
    if raw is None or not raw._open_plain_check(
        torch.Tensor, torch.nn.Parameter, plain_call.MODE_KEYS
    ):
        return None
    check: Callable[..., int] = raw._is_plain
    return check if _passes(check) else None


def _passes(check: Callable[..., int]) -> bool:
    tensor = torch.empty(2, 3, device="cpu")
    parameter = torch.nn.Parameter(torch.empty(0, device="cpu"))
    others = (tensor.T, tensor.to("meta"), tensor[:, ::2])
    with torch.no_grad():
        plain = check(tensor, parameter, None) and not check(None) and not check(tensor, 1)
        plain = plain and all(check(tensor, other) == 1 for other in others)
    for state in _states():
        with ExitStack() as stack:
            for part in state:
                stack.enter_context(part)
            if check(tensor):
                return False
    return bool(plain)


def _states() -> Iterator[list[AbstractContextManager[object]]]:
    """Yield every thread state in which the check must return False."""
    yield [torch.enable_grad()]
    yield [torch.no_grad(), TorchFunctionMode()]
    for key in plain_call.MODE_KEYS:
        yield [torch.no_grad(), torch_compat.include_dispatch_key(key)]
