"""vLLM's names for opweave's objects: code written for vLLM runs with changed imports.

Replace ``vllm`` by ``opweave_vllm.vllm_api`` in imports; module names are the same. For
layers, import :mod:`opweave.layers`. The page "Run code written for vLLM" lists every name and the
differences.

>>> from opweave_vllm.vllm_api.ir.op import IrOp
>>> IrOp.registry["rms_norm"].supported_providers()[0]
'native'
"""

from opweave_vllm.vllm_api import (
    _custom_ops,
    config,
    distributed,
    envs,
    forward_context,
    ir,
    logger,
    platforms,
    plugins,
    triton_utils,
    utils,
)
from opweave_vllm.vllm_api.model_executor.custom_op import CustomOp, PluggableLayer
from opweave_vllm.vllm_api.platforms import current_platform
from opweave_vllm.vllm_api.plugins import load_general_plugins, load_plugins_by_group

__all__ = [
    "CustomOp", "PluggableLayer", "_custom_ops", "config", "current_platform", "distributed",
    "envs", "forward_context", "ir", "load_general_plugins", "load_plugins_by_group", "logger",
    "platforms", "plugins", "triton_utils", "utils",
]  # fmt: skip
