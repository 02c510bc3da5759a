"""Every declared op, including those of plugins, as vLLM's ``IrOp``."""

from opweave import ir
from opweave_vllm.vllm_api.ir.op import IrOp, wrapper_of


def __getattr__(name: str) -> IrOp:
    if name.startswith("__"):
        raise AttributeError(name)
    return wrapper_of(getattr(ir.ops, name))


def __dir__() -> list[str]:
    return sorted(ir.current_registry().ops)
