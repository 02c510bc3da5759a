"""The factory of the Python functions of native ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from opweave.base import compat
from opweave.base.plain_call import differentiates, is_watched
from opweave.native.autograd import call_traced, call_unwatched, call_watched

Function = Callable[..., Any]

_SOURCE = """
def {op}({parameters}):{checks}
    try:
        return direct({parameters})
    except TypeError:  # tensors that need the dispatcher
        return fall_back({parameters})

def traced({parameters}):
    return {traced}
"""
_CHECKS = """
    if differentiates():
        return watched(*arguments)
    if is_watched():
        return unwatched(*arguments)"""


def callable_of(
    op: str,
    raw: ModuleType,
    namespace: str,
    *,
    direct: bool,
    problem: str | None = None,
    in_kernel: bool = False,
) -> Function:
    """Return *op* of the module *raw* as a function that takes the cheapest path for each call.

    It first tries the C++ function, which is cheap but only accepts plain CPU tensors. Dynamo
    traces the torch op instead. Arguments are positional. Its attribute ``direct`` is the bare C++
    function, for callers who know that a direct call is possible.

    Args:
        direct: whether the C++ function may be called.
        problem: why torch.ops lacks the op, if so.
        in_kernel: for calls by the kernel of an IR op, which has handled gradients, modes and
            transforms. The parameters are then explicit, because passing ``*arguments`` would cost
            more than the call itself.
    """
    torch_op: Any = _torch_op(op, namespace, problem)
    path = f"torch.ops.{namespace}.{op}.default"
    scope = {
        "__name__": __name__,  # where Dynamo looks for the next two
        "torch": torch,
        "call_traced": call_traced,
        "differentiates": differentiates,
        "is_watched": is_watched,
        "direct": getattr(raw, op) if direct else torch_op,
    }
    if in_kernel:
        checks, parameters = "", ", ".join(a.name for a in torch_op._schema.arguments)
        traced, scope["fall_back"] = f"{path}({parameters})", torch_op
    else:
        checks, parameters = _CHECKS, "*arguments"
        traced, watched, unwatched = f"call_traced({path}, *arguments)", torch_op, torch_op
        if problem is None:
            watched, unwatched = partial(call_watched, torch_op), partial(call_unwatched, torch_op)
        fall_back = partial(_fall_back, unwatched)
        scope.update(watched=watched, unwatched=unwatched, fall_back=fall_back)
    exec(_SOURCE.format(op=op, parameters=parameters, checks=checks, traced=traced), scope)
    function: Any = scope[op]
    compat.trace_instead(function, scope["traced"] if problem is None else torch_op)
    compat.run_untraced(function)  # after a graph break
    function.__doc__, function.direct = getattr(raw, op).__doc__, scope["direct"]
    return cast(Function, function)


def _torch_op(op: str, namespace: str, problem: str | None) -> Function:
    """Return the torch op, or a function that raises if it is unavailable."""
    if problem is None:
        found: Function = getattr(getattr(torch.ops, namespace), op).default
        return found

    def unavailable(*arguments: object) -> None:
        raise RuntimeError(f"torch.ops.{namespace}.{op} is not available: {problem}.")

    return unavailable


def _fall_back(unwatched: Function, *arguments: Any) -> Any:
    """Call the dispatcher after a TypeError of the C++ function, if it may be of use."""
    if any(isinstance(a, Tensor) for a in arguments) or has_torch_function(arguments):
        return unwatched(*arguments)
    raise  # noqa: PLE0704 (the error of the C++ function is clearer than the dispatcher's)
