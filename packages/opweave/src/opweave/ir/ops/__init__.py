"""The declared ops: ``ir.ops.rms_norm``, and every op that a plugin declares.

One file per family; the decorated function of each op is its definition.
"""

from importlib import import_module as _import_module

# Type checkers take an op with the name of its file for the file, unless it is imported.
from opweave.ir.ops.embedding import embedding as embedding
from opweave.ir.ops.fused_experts import fused_experts as fused_experts
from opweave.ir.ops.fused_experts_quant import fused_experts_quant as fused_experts_quant
from opweave.ir.ops.linear import linear as linear
from opweave.ir.ops.paged_attention import paged_attention as paged_attention
from opweave.ir.registry import IrOp as _IrOp
from opweave.ir.registry import current_registry as _current_registry
from opweave.ir.registry import find_op as _find_op

_FAMILIES = (
    "activation", "arguments", "attention", "conv", "embedding", "fused_experts",
    "fused_experts_quant", "fused_quant", "kv_cache", "linear", "low_bit", "mla_attention",
    "moe_routing", "norm", "paged_attention", "quant", "rotary", "ssd", "state_space",
)  # fmt: skip

# Attributes are ops, so that a plugin's op may have the name of a file; files stay importable.
for _name in _FAMILIES:
    _import_module(f"{__name__}.{_name}")
for _name in _FAMILIES:
    del globals()[_name]
globals().update(_current_registry().ops)
__all__ = sorted(_current_registry().ops)  # noqa: PLE0605 (it is a list)


def __getattr__(name: str) -> _IrOp:
    if name.startswith("__"):
        raise AttributeError(name)
    return _find_op(name)
