"""Provider ``opweave_c_int8``: linear layers that round activations to 8 bits, for few tokens."""

from __future__ import annotations

from torch import Tensor

from opweave.ir import ops
from opweave.kernels.opweave_c import linear
from opweave.kernels.opweave_c.calls import implements, native_op, new_rows

_PROVIDER = "opweave_c_int8"

_linear_gguf_int8 = native_op("linear_gguf_int8")

# The largest number of tokens for which these kernels are faster than those of opweave_c for many.
_MAX_TOKENS_Q = {**linear.MAX_TOKENS_Q}


@implements(
    ops.linear_q,
    linear.ACCEPTED_Q,
    traits=(),
    provider=_PROVIDER,
    needs=(*linear.NEEDS_Q, "linear_gguf_int8"),
)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """Return ``x @ dequantized(weight).T + bias``; for few tokens, with *x* rounded to 8 bits."""
    if linear.is_known(x.numel() > _MAX_TOKENS_Q[x.dtype] * x.shape[-1]):
        result: Tensor = linear.linear_q(x, weight, bias, format)
        return result
    out = new_rows(x, weight.shape[0])
    _linear_gguf_int8(out, x, weight, bias, linear.FORMATS.index(format))
    return out
