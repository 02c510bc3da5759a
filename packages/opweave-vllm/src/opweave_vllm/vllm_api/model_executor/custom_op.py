"""``CustomOp``, ``PluggableLayer`` and their registries, which are opweave's own."""

from opweave.layers import CustomOp, PluggableLayer, replacement

__all__ = ["CustomOp", "PluggableLayer", "maybe_get_oot_by_class", "op_registry", "op_registry_oot"]

op_registry = CustomOp.op_registry
op_registry_oot = CustomOp.op_registry_oot
maybe_get_oot_by_class = replacement
