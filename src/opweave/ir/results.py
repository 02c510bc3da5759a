"""What implementations return, held against what their op promises.

Their number is looked at whenever a function was generated anew, and where calls are slow anyway;
their dtypes, shapes, devices and memory, which takes longer, at the first call of an
implementation, and if that had one row only, at the first that has more. Not so those of opweave's
own implementations, which its tests compare with the ops: torch's first elementwise function of a
tensor on ``meta`` imports ``torch._dynamo``, which takes over a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opweave.base import compat, torch_state
from opweave.ir.errors import InvalidResultError
from opweave.ir.impl import IrOpImpl
from opweave.ir.names import ANNOTATIONS
from opweave.ir.selection import tensors_in
from opweave.ir.torch_ops import find_target

_OUTPUTS = (Tensor, torch.fx.Proxy)
_META = torch.device("meta")
_MOST_LOOKS = 1000  # several forwards of a deep model with one token
_looks: WeakKeyDictionary[IrOpImpl, int] = WeakKeyDictionary()


class _Output(NamedTuple):
    """What is compared of an output."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] {self.device}"


def check_result(
    impl: IrOpImpl, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Check what *impl* has returned for these arguments; return whether that was the last look.

    Raises:
        InvalidResultError: the outputs are not those of the op.
    """
    _check_count(impl, result)
    if impl.impl_fn is impl.op.native or impl.site.is_in_opweave:
        return True
    looks = _looks.get(impl, 0)
    if looks < _MOST_LOOKS:
        given = tensors_in([*args, *kwargs.values()])
        # What is wrong with a shape may not show in one row, which is what a warm-up may be.
        one_row = bool(given) and given[0].shape[:1] == (1,)
        if not (looks and one_row):
            _check_metadata(impl, result, given, args, kwargs)
        _looks[impl] = looks = looks + 1 if one_row else _MOST_LOOKS
    return looks == _MOST_LOOKS


def _check_count(impl: IrOpImpl, result: Any) -> None:
    count, is_tuple = impl.op.schema.num_outputs, impl.op.schema.returns_tuple
    if isinstance(result, torch.fx.Proxy):
        return  # a tracer's, for one output or for several
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
    for i, (said, has) in enumerate(zip(_expected(impl, args, kwargs), found, strict=False)):
        if has != (wanted := _located(said, given, has)):
            which = f" as output {i}" if len(found) > 1 else ""
            raise _invalid(
                impl,
                f"returned {has}{which} where the op, by its fake implementation, has {wanted}. "
                "Mend it, or leave the provider out of the priority.",
            )
    if not impl.inplace:
        _check_memory(impl, outputs, given)


def _check_memory(impl: IrOpImpl, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Check that outputs are in memory of their own: who changes one changes no argument."""
    for i, output in enumerate(outputs):
        if output.numel() and any(compat.share_storage(output, t) for t in given):
            which = f"output {i}" if len(outputs) > 1 else "its output"
            raise _invalid(
                impl,
                f"returned {which} in the memory of an argument. Clone it; or if it writes into "
                "the op's activations, register it with inplace=True.",
            )


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    return all(type(t) in torch_state.PLAIN_TYPES and t.layout is torch.strided for t in tensors)


def _is_undisturbed(given: Sequence[Tensor]) -> bool:
    """Whether nothing but the arguments decides what comes out."""
    devices = {t.device.type for t in given}
    return not torch_state.is_watched() and not any(
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        for device in devices
    )


def _expected(impl: IrOpImpl, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Output]:
    """Return what the op says that comes out, or nothing where only the data will tell."""
    try:
        with torch.no_grad(), _Faking():
            result = impl.op.fake(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
    except Exception:  # the kernel has done its work, and a fake that cannot is no fault of its
        return []
    return [_Output(t.dtype, tuple(t.shape), t.device) for t in tensors_in([result])]


def _located(output: _Output, given: Sequence[Tensor], found: _Output) -> _Output:
    """Say on which device *output* is: that of the arguments, if they agree on one."""
    if output.device != _META:
        return output
    devices = {t.device for t in given}
    return output._replace(device=devices.pop() if len(devices) == 1 else found.device)


def _meta(value: Any) -> Any:
    """Return a tensor without memory for a tensor: quicker to come by than a fake one."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_meta, value))
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


class _Faking(TorchFunctionMode):
    """Calls the fake implementations of ops: kernels are not made for tensors without memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        target, named = find_target(function), kwargs or {}
        if target is None:
            return function(*args, **named)
        with self:  # for the ops that are called inside
            return target.op.fake(*args, **{k: v for k, v in named.items() if k not in ANNOTATIONS})


def _invalid(impl: IrOpImpl, problem: str) -> InvalidResultError:
    return InvalidResultError(
        f"{impl.op.name}: the implementation {impl.provider!r} ({impl.place}) {problem}"
        f"{impl.way_out}"
    )
