"""Keeps the experts of a checkpoint quantized, where all of a layer have one format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opweave.layers import FusedMoE
from opweave.layers.linear import LinearMethod
from opweave.layers.linear.w8a8 import W8A8Method
from opweave.layers.moe import QuantizedFusedMoEMethod, UnquantizedFusedMoEMethod
from opweave.layers.moe.quantized import experts_format
from opweave_engine.models import CheckpointModel


def set_experts(
    model: CheckpointModel, name: str, layer: FusedMoE, methods: Mapping[str, LinearMethod]
) -> dict[str, LinearMethod]:
    """Choose how *layer* keeps its weights.

    Args:
        model: the model.
        name: the name of *layer* in it.
        layer: whose weights are not loaded yet.
        methods: how quantized matrices are kept, by the model's names of their modules.

    Returns:
        How the modules whose weights stay quantized keep them, by these names.
    """
    gate, down, up = model.experts
    ids = range(layer.num_experts)
    parts = {
        part: [model.own_name(f"{name}.{expert}.{part}") for expert in ids]
        for part in (gate, down, up)
    }
    w13 = _common([*parts[gate], *parts[up]], methods)
    w2 = _common(parts[down], methods)
    layer.prefix = layer.prefix or name  # for errors
    is_interleaved = layer.activation == "swigluoai"
    if w13 is None or w2 is None or is_interleaved or layer.w13_bias is not None:
        layer.set_quant_method(UnquantizedFusedMoEMethod())
        return {}
    w13 = for_outputs(w13, [layer.intermediate_size // layer.placement.tp_size])
    w2 = for_outputs(w2, [layer.hidden_size])
    layer.set_quant_method(QuantizedFusedMoEMethod(w13, w2))
    chosen = {gate: w13, down: w2, up: w13}
    return {module: chosen[part] for part, modules in parts.items() for module in modules}


def for_outputs(method: LinearMethod, sizes: Sequence[int]) -> LinearMethod:
    """Return *method* for outputs of these *sizes*, which blocks must not cross."""
    return method.for_outputs(sizes) if isinstance(method, W8A8Method) else method


def _common(names: Iterable[str], methods: Mapping[str, LinearMethod]) -> LinearMethod | None:
    """Return the method of all these modules; None if it is not one that experts support."""
    found = {methods.get(name) for name in names}
    method = found.pop()
    return None if found or experts_format(method) is None else method
