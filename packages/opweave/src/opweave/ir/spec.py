"""The immutable declaration of an op: its spellings, tolerances and memory traffic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from opweave import torch_compat
from opweave.ir.errors import InvalidOpError, did_you_mean
from opweave.ir.rules import DIFFERENTIABLE, check_traits
from opweave.ir.schema import Schema, check_op_name
from opweave.registration import Owner, Site, caller_site, current_owner

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


# Spellings: plain PyTorch code that computes the same as an op.


# Inductor fuses row-wise code with its neighbors, and a call of a kernel takes about 3 us more. On
# a Xeon, kernels were faster with 512 x 4,096 elements, by 1.2 to 1.5, and not always with
# 64 x 2,048.
ROWWISE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Spelling:
    """A function in plain PyTorch that computes the same as an op.

    The compiler recognizes the operators that the function traces to, and replaces them with a call
    of the op.

    Attributes:
        name: the function's name.
        function: the function; it has the op's parameters.
        call: a function with the same parameters that calls the op; None: call the op with the
            arguments unchanged.
        inputs: returns arguments to trace the function with; by default the op's input generator.
        marker: the name of an aten operator that is in every trace of the function. Graphs without
            it are not searched. Empty: search all graphs.
        constants: the parameters that must be inputs of the graph, such as weights.
        elements: the minimum size of the first argument, in elements, for which a kernel is faster
            than generated code. Code whose first argument may be smaller is not replaced.
    """

    name: str
    function: Callable[..., Any]
    call: Callable[..., Any] | None = None
    inputs: Callable[..., tuple[Any, ...]] | None = None
    marker: str = ""
    constants: tuple[str, ...] = ()
    elements: int = 0


# Tolerances for comparing an implementation with native, by dtype.


class Tolerance(NamedTuple):
    """Absolute and relative tolerance, as in :func:`torch.testing.assert_close`.

    Attributes:
        atol: absolute tolerance.
        rtol: relative tolerance.
    """

    atol: float
    rtol: float


DEFAULT_TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-8, 1e-8),
    torch.float32: Tolerance(1e-5, 1.3e-6),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-3, 1.6e-2),
    torch.float8_e4m3fn: Tolerance(0.1, 0.1),
    torch.float8_e5m2: Tolerance(0.2, 0.2),
    torch.int8: Tolerance(1, 0),
}


# Lower bound of the memory traffic of a call, in bytes.


_TABLES = frozenset({"embedding", "masked_embedding"})


def least_bytes(op: IrOp, values: Sequence[Any], results: Iterable[Any]) -> int | None:
    """Return the total size in bytes of the tensor arguments and results of a call.

    Args:
        op: the op.
        values: one value per parameter of *op*; symbolic sizes count as their hints.
        results: the outputs of the call.

    Returns:
        The number of bytes, or None for data-dependent sizes and for ops that read only a part of
        an argument, such as an embedding table or a KV cache.
    """
    if op.name in _TABLES or any("cache" in name for name in op.schema.names):
        return None
    sizes = [_bytes(each) for each in (*_flat(values), *_flat(results))]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _flat(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _flat(value)
    return found


def _bytes(tensor: Tensor) -> int | None:
    count = torch_compat.size_hint(tensor.numel())
    return None if count is None else count * tensor.element_size()


# The immutable declaration of an op.


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The declaration of an op, without its registry, implementations and settings.

    Attributes:
        name: the name in ``ir.ops`` and ``torch.ops``.
        native: the function that defines it.
        schema: its parameters and outputs.
        activations: the parameters that ``maybe_inplace`` donates, in the order of the schema.
        allow_inplace: whether it has ``maybe_inplace``.
        composite: whether native is written in other ops, so that the compiler can recognize it.
        keeps_strides: the activations whose outputs have the strides of the input.
        native_traits: the promises of native, see :mod:`opweave.ir.rules`.
        autocast: whether ``torch.autocast`` applies to calls; if not, they run with it disabled.
        site: where it was declared.
        owner: the plugin that declared it, if any.
    """

    name: str
    native: Callable[..., Any]
    schema: Schema
    activations: tuple[str, ...]
    allow_inplace: bool
    composite: bool
    keeps_strides: frozenset[str]
    native_traits: frozenset[str]
    autocast: bool
    site: Site
    owner: Owner | None

    @classmethod
    def of(
        cls,
        native: Callable[..., Any],
        *,
        name: str | None = None,
        activations: Sequence[str] | None = None,
        allow_inplace: bool = False,
        composite: bool = False,
        native_traits: Iterable[str] = (),
        keeps_strides: Sequence[str] = (),
        autocast: bool = True,
    ) -> OpSpec:
        """Check and return the declaration of an op; see :func:`opweave.ir.register_op`.

        Raises:
            InvalidNameError: the name is malformed or reserved.
            InvalidOpError: *native* cannot be an op, or the options do not fit it.
            UnknownTraitError: a trait does not exist.
        """
        if not inspect.isfunction(native):
            raise InvalidOpError(
                f"an op must be declared with a Python function (def), not with {native!r}."
            )
        name = check_op_name(native.__name__ if name is None else name)
        schema = Schema.of(native, name)
        found = _activations(schema, name, activations)
        if allow_inplace and len(found) != schema.num_outputs:
            raise InvalidOpError(
                f"op {name!r}: allow_inplace=True needs as many activations as outputs; found "
                f"activations {list(found)} and {schema.num_outputs} output(s)."
            )
        for kept in sorted(set(keeps_strides).difference(found)):
            raise InvalidOpError(
                f"op {name!r}: keeps_strides names {kept!r}, which is not an activation. "
                f"{did_you_mean(kept, found)}"
            )
        return cls(
            name,
            native,
            schema,
            found,
            allow_inplace,
            composite,
            frozenset(keeps_strides),
            check_traits({DIFFERENTIABLE, *native_traits}),
            autocast,
            caller_site(),
            current_owner(),
        )


def _activations(schema: Schema, op_name: str, names: Sequence[str] | None) -> tuple[str, ...]:
    tensors = [p.name for p in schema.tensors if not p.is_optional]
    if names is None:
        return tuple(name for name in tensors if name.startswith("x"))
    for name in names:
        if name not in tensors:
            raise InvalidOpError(
                f"op {op_name!r}: activation {name!r} is not a required tensor parameter. "
                f"{did_you_mean(name, tensors)}"
            )
    return tuple(name for name in tensors if name in names)
