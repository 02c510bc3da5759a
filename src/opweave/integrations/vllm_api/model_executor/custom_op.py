"""``CustomOp`` and ``PluggableLayer``: opweave's own, which mean the same."""

from __future__ import annotations

from opweave.layers import CustomOp, PluggableLayer

__all__ = ["CustomOp", "PluggableLayer", "op_registry", "op_registry_oot"]

op_registry = CustomOp.op_registry
op_registry_oot = CustomOp.op_registry_oot
