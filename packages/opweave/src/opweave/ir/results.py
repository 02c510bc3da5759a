"""Check the results of implementations against the outputs of their op.

The number of outputs is checked at the first call of each generated function, and in every call of
the slow path. Dtypes, shapes, devices and memory take longer to check: this happens at the first
call of an implementation and, if that had a single row, at the first call with more. opweave's own
implementations are exempt, since its tests cover them, and the first elementwise function of a
meta tensor imports ``torch._dynamo``, which takes over a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opweave import plain_call, torch_compat
from opweave.ir.errors import InvalidResultError
from opweave.ir.impl import IrOpImpl
from opweave.ir.schema import ANNOTATIONS
from opweave.ir.selection import autocasts, tensors_in
from opweave.ir.torch_ops import find_target

_OUTPUTS = (Tensor, torch.fx.Proxy)
_META = torch.device("meta")
# Stop waiting for a call with more than one row after several one-token forwards of a deep model.
_MAX_CHECKS = 1000
_checks: WeakKeyDictionary[IrOpImpl, int] = WeakKeyDictionary()


class _Output(NamedTuple):
    """The metadata of an output that is compared."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] {self.device}"


def check_result(
    impl: IrOpImpl, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Check the result of *impl* for these arguments.

    Returns:
        Whether later results of *impl* need no check.

    Raises:
        InvalidResultError: the outputs do not match the op's.
    """
    _check_count(impl, result)
    if impl.impl_fn is impl.op.native or impl.site.is_in_opweave:
        return True
    checks = _checks.get(impl, 0)
    if checks < _MAX_CHECKS:
        given = tensors_in([*args, *kwargs.values()])
        # A wrong shape may go unnoticed with a single row, as in a warm-up call.
        one_row = bool(given) and given[0].shape[:1] == (1,)
        if not (checks and one_row):
            _check_metadata(impl, result, given, args, kwargs)
        _checks[impl] = checks = checks + 1 if one_row else _MAX_CHECKS
    return checks == _MAX_CHECKS


def _check_count(impl: IrOpImpl, result: Any) -> None:
    count, is_tuple = impl.op.schema.num_outputs, impl.op.schema.returns_tuple
    if isinstance(result, torch.fx.Proxy):
        return  # a proxy may stand for any number of outputs
    is_sequence = isinstance(result, (tuple, list))
    outputs = result if is_sequence else [result]
    wrong = [type(value).__name__ for value in outputs if not isinstance(value, _OUTPUTS)]
    if is_sequence == is_tuple and len(outputs) == count and not wrong:
        return
    wanted = f"a tuple of {count} Tensors" if is_tuple else "one Tensor"
    found = type(result).__name__
    if is_sequence:
        found += f" of {len(outputs)}" + (f" with {wrong[0]} in it" if wrong else "")
    raise _invalid(impl, f"must return {wanted}, found {found}.")


def _check_metadata(
    impl: IrOpImpl,
    result: Any,
    given: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    outputs = tensors_in([result])
    if not (_are_plain([*given, *outputs]) and _is_undisturbed(given)):
        return
    found = [_Output(t.dtype, tuple(t.shape), t.device) for t in outputs]
    for i, (fake, has) in enumerate(zip(_expected(impl, args, kwargs), found, strict=False)):
        if has != (wanted := _located(fake, given, has)):
            which = f" as output {i}" if len(found) > 1 else ""
            raise _invalid(
                impl,
                f"returned {has}{which}, but the op's fake implementation returns {wanted}. "
                "Fix it, or leave the provider out of the priority.",
            )
    if not impl.inplace:
        _check_memory(impl, outputs, given)


def _check_memory(impl: IrOpImpl, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Check that no output shares memory with an argument."""
    for i, output in enumerate(outputs):
        if output.numel() and any(torch_compat.share_storage(output, t) for t in given):
            which = f"output {i}" if len(outputs) > 1 else "its output"
            raise _invalid(
                impl,
                f"returned {which} in the memory of an argument. Clone it; or if it writes into "
                "the op's activations, register it with inplace=True.",
            )


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    return all(type(t) in plain_call.PLAIN_TYPES and t.layout is torch.strided for t in tensors)


def _is_undisturbed(given: Sequence[Tensor]) -> bool:
    """Whether the outputs depend on the arguments alone, not on a mode or autocast."""
    return not plain_call.is_watched() and not autocasts(given)


def _expected(impl: IrOpImpl, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Output]:
    """Return the outputs of the op's fake implementation, or an empty list if that fails."""
    try:
        with torch.no_grad(), _Faking():
            result = impl.op.fake(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
    except Exception:  # data-dependent shapes, or a faulty fake: not an error of the kernel
        return []
    return [_Output(t.dtype, tuple(t.shape), t.device) for t in tensors_in([result])]


def _located(output: _Output, given: Sequence[Tensor], found: _Output) -> _Output:
    """Return a fake *output* on the device of the arguments, or of *found* if those differ."""
    if output.device != _META:
        return output
    devices = {t.device for t in given}
    return output._replace(device=devices.pop() if len(devices) == 1 else found.device)


def _meta(value: Any) -> Any:
    """Replace tensors by meta tensors, which are cheaper to make than fake tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_meta, value))
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


class _Faking(TorchFunctionMode):
    """Runs the fake implementations of ops, since kernels do not support meta tensors."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        target, named = find_target(function), kwargs or {}
        if target is None:
            return function(*args, **named)
        with self:  # also for ops called inside
            return target.op.fake(*args, **{k: v for k, v in named.items() if k not in ANNOTATIONS})


def _invalid(impl: IrOpImpl, problem: str) -> InvalidResultError:
    return InvalidResultError(
        f"{impl.op.name}: the implementation {impl.provider!r} ({impl.place}) {problem}"
        f"{impl.way_out}"
    )
