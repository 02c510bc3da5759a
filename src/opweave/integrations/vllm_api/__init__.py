"""vLLM's names for what opweave has: code written against them runs with the imports changed.

Write ``opweave.integrations.vllm_api`` where an import says ``vllm``; modules have the names that
they have there. For the layers, import :mod:`opweave.layers`. The page "Run code written for
vLLM" lists every name, and what differs.

>>> from opweave.integrations.vllm_api.ir.op import IrOp
>>> IrOp.registry["rms_norm"].supported_providers()[0]
'native'
"""

from __future__ import annotations

from opweave.integrations.vllm_api import config, ir, logger, platforms, plugins, utils
from opweave.integrations.vllm_api.model_executor.custom_op import CustomOp, PluggableLayer
from opweave.integrations.vllm_api.platforms import current_platform
from opweave.integrations.vllm_api.plugins import load_general_plugins, load_plugins_by_group

__all__ = [
    "CustomOp",
    "PluggableLayer",
    "config",
    "current_platform",
    "ir",
    "load_general_plugins",
    "load_plugins_by_group",
    "logger",
    "platforms",
    "plugins",
    "utils",
]
