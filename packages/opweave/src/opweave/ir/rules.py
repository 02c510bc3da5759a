"""Declarative predicates: rules for the arguments that an implementation supports.

For example::

    supports_args=rules.cpu("x", "weight") & rules.dtype("x", torch.float32, torch.bfloat16)

Combine rules with ``&`` and ``|``. They compile into one expression, which the eager fast path
inlines and selection evaluates; the rule that fails gives the reason. An optional tensor that is
None passes every rule about tensors.

No rule depends on the batch size or the environment. To choose by size, use priorities, or the
option ``compile_ranges`` for compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opweave.ir.errors import PredicateSignatureError
from opweave.ir.rule import Custom, LastDimRule, PairRule, Rule, TensorRule, ValueRule, plain


def dtype(name: str, *dtypes: torch.dtype) -> Rule:
    """Parameter *name* has one of *dtypes*."""
    _check_given(dtypes, "dtype", torch.dtype)
    wanted = ", ".join(plain(d) for d in dtypes)
    test = " or ".join(f"{{t}}.dtype is {{{i}}}" for i in range(len(dtypes)))
    return TensorRule(
        (name,), f"({test})", lambda n, t: f"{n}: {plain(t.dtype)} (supports {wanted})", dtypes
    )


def same_dtype(*names: str) -> Rule:
    """The tensors have the same dtype."""
    return PairRule(names, "dtype")


def same_shape(*names: str) -> Rule:
    """The tensors have the same shape."""
    return PairRule(names, "shape")


def same_device(*names: str) -> Rule:
    """The tensors are on the same device."""
    return PairRule(names, "device")


def cpu(*names: str) -> Rule:
    """The tensors are on the CPU and not lazily negated (:meth:`torch.Tensor.is_neg`)."""
    return TensorRule(names, "({t}.is_cpu and not {t}.is_neg())", _in_memory("cpu"))


def cuda(*names: str) -> Rule:
    """The tensors are on a CUDA or ROCm device and not lazily negated."""
    return TensorRule(names, "({t}.is_cuda and not {t}.is_neg())", _in_memory("cuda"))


def device(kind: str, *names: str) -> Rule:
    """The tensors are on a device of type *kind*, such as ``"xpu"``, and not lazily negated."""
    test = "({t}.device.type == {0} and not {t}.is_neg())"
    return TensorRule(names, test, _in_memory(kind), (kind,))


def has_values(*names: str) -> Rule:
    """The tensors are not on the meta device."""
    return TensorRule(
        names, "not {t}.is_meta", lambda n, t: f"{n}: on {t.device} (supports tensors with values)"
    )


def contiguous(*names: str) -> Rule:
    """The tensors are contiguous."""
    return TensorRule(names, "{t}.is_contiguous()", _strides("contiguous"))


def unit_stride(*names: str) -> Rule:
    """The stride of the tensors' last dimension is 1."""
    test = "({t}.is_contiguous() or ({t}.ndim > 0 and {t}.stride()[-1] == 1))"
    return TensorRule(names, test, _strides("last stride 1"))


def ndim(name: str, *counts: int) -> Rule:
    """Parameter *name* has one of these numbers of dimensions (``Tensor.ndim``)."""
    _check_given(counts, "ndim", int)
    wanted = " or ".join(map(str, counts))
    return TensorRule(
        (name,),
        "({t}.ndim in {0})",
        lambda n, t: f"{n}: {t.ndim}-d (supports {wanted}-d)",
        (frozenset(counts),),
    )


def last_dim_multiple_of(name: str, factor: int) -> Rule:
    """The size of the last dimension is a multiple of *factor*."""
    if not isinstance(factor, int) or factor < 1:
        raise PredicateSignatureError(
            f"rules.last_dim_multiple_of takes a positive int, not {factor!r}."
        )
    return TensorRule(
        (name,),
        "({t}.ndim > 0 and {t}.shape[-1] % {0} == 0)",
        lambda n, t: f"{n}: last dimension of {tuple(t.shape)} (supports multiples of {factor})",
        (factor,),
    )


def per_last_dim(vector: str, tensor: str) -> Rule:
    """*vector* is 1-d and as long as the last dimension of *tensor*."""
    return LastDimRule(vector, tensor)


def is_none(name: str) -> Rule:
    """Parameter *name* is None."""
    return ValueRule(name, "{v} is None", "None")


def not_none(name: str) -> Rule:
    """Parameter *name* is not None."""
    return ValueRule(name, "{v} is not None", "a value")


def one_of(name: str, *values: object) -> Rule:
    """Parameter *name* equals one of *values*."""
    _check_given(values, "one_of", object)
    return ValueRule(name, "{v} in {0}", " or ".join(map(repr, values)), (values,))


def custom(function: Callable[..., bool], why: str) -> Rule:
    """*function* returns True for the arguments it takes by name; *why* is the reason if not.

    ``rules.custom(lambda group_size: group_size >= 1, "group_size is below 1")``
    """
    return Custom(function, why)


def _check_given(values: tuple[object, ...], rule: str, kind: type) -> None:
    if not values:
        raise PredicateSignatureError(f"rules.{rule} needs at least one value.")
    for value in values:
        if not isinstance(value, kind):
            raise PredicateSignatureError(
                f"rules.{rule} takes {kind.__module__}.{kind.__name__} values, not {value!r}."
            )


def _in_memory(kind: str) -> Callable[[str, Any], str]:
    def reason(name: str, tensor: Any) -> str:
        if tensor.device.type == kind:
            return f"{name}: lazily negated (supports resolved tensors)"
        return f"{name}: on {tensor.device} (supports {kind})"

    return reason


def _strides(wanted: str) -> Callable[[str, Any], str]:
    return lambda n, t: f"{n}: strides {tuple(t.stride())} (supports {wanted})"
