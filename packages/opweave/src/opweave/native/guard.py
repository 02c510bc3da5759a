"""The native check whether a call may bypass torch's dispatcher, with a self-test before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import torch
from torch.overrides import TorchFunctionMode

from opweave.base import compat, plain_call
from opweave.native import loader


class _FunctionMode(TorchFunctionMode):
    pass


def plain_check() -> Callable[..., bool] | None:
    """Return the native check (see :func:`opweave.ir.codegen.use_plain_check`), or None.

    None if there is no native module, if torch lacks a symbol that it needs, or if the self-test
    fails.
    """
    raw = loader.module()
    if raw is None or not raw._open_plain_check(
        torch.Tensor, torch.nn.Parameter, plain_call.MODE_KEYS
    ):
        return None
    check: Callable[..., bool] = raw._is_plain
    return check if _passes(check) else None


def _passes(check: Callable[..., bool]) -> bool:
    tensor = torch.empty(0, device="cpu")
    parameter = torch.nn.Parameter(torch.empty(0, device="cpu"))
    with torch.no_grad():
        plain = check(tensor, parameter, None) and not check(None) and not check(tensor, 1)
    return plain and not any(_answers_in(check, tensor, state) for state in _states())


def _states() -> Iterator[list[AbstractContextManager[object]]]:
    """Yield every thread state in which the check must return False."""
    yield [torch.enable_grad()]
    yield [torch.no_grad(), _FunctionMode()]
    for key in plain_call.MODE_KEYS:
        yield [torch.no_grad(), compat.include_dispatch_key(key)]


def _answers_in(
    check: Callable[..., bool], tensor: torch.Tensor, state: list[AbstractContextManager[object]]
) -> bool:
    with ExitStack() as stack:
        for part in state:
            stack.enter_context(part)
        return check(tensor)
