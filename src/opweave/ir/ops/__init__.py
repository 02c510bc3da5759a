"""The declared ops: ``ir.ops.rms_norm``, and every op that a plugin declares.

One file for each family; each op's function is its definition.
"""

from opweave.ir.op import IrOp as _IrOp
from opweave.ir.ops.activation import gelu_and_mul, mul_and_silu, silu_and_mul
from opweave.ir.ops.attention import causal_attention, varlen_attention
from opweave.ir.ops.embedding import embedding
from opweave.ir.ops.linear import linear
from opweave.ir.ops.norm import fused_add_rms_norm, rms_norm
from opweave.ir.ops.rotary import apply_rotary_emb, rotary_embedding
from opweave.ir.registry import find_op as _find_op

__all__ = [
    "apply_rotary_emb",
    "causal_attention",
    "embedding",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "linear",
    "mul_and_silu",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "varlen_attention",
]


# An op may have the name of a file here; the files stay importable.
del activation, attention, norm, rotary  # type: ignore[name-defined]  # noqa: F821


def __getattr__(name: str) -> _IrOp:
    if name.startswith("__"):
        raise AttributeError(name)
    return _find_op(name)
