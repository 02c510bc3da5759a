"""vLLM's names for the IR: ``register_op``, ``ops``, ``op.IrOp``, and the torch wrap."""

from opweave_vllm.vllm_api.ir.op import IrOp, IrOpImpl, register_op
from opweave_vllm.vllm_api.ir.torch_wrap import enable_torch_wrap, set_default_torch_wrap

from opweave_vllm.vllm_api.ir import ops  # isort: skip (wraps with the names above)

__all__ = ["IrOp", "IrOpImpl", "enable_torch_wrap", "ops", "register_op", "set_default_torch_wrap"]
