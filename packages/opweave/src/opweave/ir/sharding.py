"""DTensor support: a sharding strategy for row-wise ops, an error for all others.

A row is one index of dimension 0. An op whose native implementation has the trait ``rowwise`` runs
on each shard of the rows without communication. ``torch.distributed`` is not imported unless the
program has imported DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from opweave.ir.errors import DTensorError
from opweave.ir.names import ANNOTATIONS
from opweave.ir.priority import NATIVE
from opweave.ir.selection import tensors_in
from opweave.ir.traits import ROWWISE

if TYPE_CHECKING:
    from opweave.ir.op import IrOp

_registered: WeakSet[IrOp] = WeakSet()


def prepare_sharding(op: IrOp, values: tuple[Any, ...]) -> None:
    """Register the sharding strategy of *op* if one of *values* is a DTensor.

    Raises:
        DTensorError: an argument is a DTensor, and the op is not row-wise.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or op in _registered:
        return
    if not any(isinstance(tensor, module.DTensor) for tensor in tensors_in(values)):
        return
    if ROWWISE not in op.impls[NATIVE].traits:
        raise DTensorError(
            f"{op.name} has no sharding strategy for DTensor arguments, because it is not "
            "row-wise. Call it with local tensors, x.to_local() or x.full_tensor(), or declare the "
            "op with native_traits=['rowwise'] if each row of its outputs depends on that row of "
            "the activations alone."
        )
    _register(op)
    _registered.add(op)


def _register(op: IrOp) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def strategy(*args: Any, **kwargs: Any) -> Any:
        values = op.bind(*args, **{k: v for k, v in kwargs.items() if k not in ANNOTATIONS})
        named = dict(zip(op.schema.names, values, strict=True))
        rows = named[op.activations[0]].shape[:-1]
        outputs = op.schema.num_outputs
        found: Any = [([Replicate()] * outputs, [_if_tensor(v, Replicate()) for v in values])]
        if all(named[name].shape[:-1] == rows for name in op.activations) and rows:
            inputs = [_if_tensor(v, Shard(0) if _has(rows, v) else Replicate()) for v in values]
            found.append(([Shard(0)] * outputs, inputs))
        return found

    torch_ops: Any = (op.torch_ops.default, op.torch_ops.maybe_inplace, op.torch_ops.annotated)
    register_sharding([torch_op for torch_op in torch_ops if torch_op is not None])(strategy)


def _has(rows: torch.Size, value: Any) -> bool:
    """Whether *value* is a tensor with these rows, and not a weight with fewer dimensions."""
    return bool(getattr(value, "shape", ())[:-1] == rows)


def _if_tensor(value: Any, placement: Any) -> Any:
    return placement if hasattr(value, "shape") else None
