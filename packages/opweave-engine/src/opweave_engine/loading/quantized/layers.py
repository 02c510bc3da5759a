"""Builds models whose linear layers keep the weights of a checkpoint quantized."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from opweave.layers import FusedMoE, ParallelLMHead, VocabParallelEmbedding
from opweave.layers.block_embedding import BlockEmbeddingMethod
from opweave.layers.linear import ColumnParallelLinear, LinearBase, LinearMethod
from opweave.layers.linear.low_bit import BlockMethod, GroupedInt4Method, SeparatePartsMethod
from opweave.layers.linear.method import UnquantizedLinearMethod, deferred_weights
from opweave.layers.linear.w8a8 import W8A8Method
from opweave_engine.loading.build import build
from opweave_engine.loading.quantized.experts import for_outputs, set_experts
from opweave_engine.loading.sources import QuantizedSource, TensorSource
from opweave_engine.models import CausalLM, CheckpointModel

_log = logging.getLogger(__name__)


def build_quantized(
    config: Mapping[str, Any], dtype: torch.dtype, sources: Sequence[TensorSource]
) -> tuple[CheckpointModel, Mapping[str, LinearMethod]]:
    """Build a model for the weights of *sources*, which are not loaded yet.

    Returns:
        The model, and how modules keep a quantized weight, by their names in the checkpoint.
        Quantized weights of all others are to be dequantized.
    """
    methods: dict[str, LinearMethod] = {}
    for source in sources:
        if isinstance(source, QuantizedSource):
            methods |= source.methods
    if not methods:
        return build(config, dtype), {}
    with deferred_weights():
        model = build(config, dtype)
    names = {model.own_name(name): name for name in methods}
    own = {model.own_name(name): method for name, method in methods.items()}
    kept: dict[str, LinearMethod] = {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LinearBase):
            parts = dict(part_names(model, name))
            layer.prefix = layer.prefix or name  # for errors
            found = {} if name.rpartition(".")[2] in model.dense else own
            method = _method(layer, parts, found)
            layer.set_quant_method(method)
            for part in parts:
                if part in found:
                    kept[names[part]] = _of_part(method, part)
        elif isinstance(layer, FusedMoE):
            of_experts = set_experts(model, name, layer, own)
            kept |= {names[part]: method for part, method in of_experts.items()}
    kept |= {names[name]: own[name] for name in _set_tables(model, own)}
    model.requires_grad_(False)
    if left := methods.keys() - kept:
        kinds = Counter(name.rpartition(".")[2] for name in left)
        _log.warning(
            "%d quantized weights are dequantized to %s while they are loaded, because their "
            "layers have no quantized form: %s",
            len(left), str(dtype).removeprefix("torch."),
            ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items())),
        )  # fmt: skip
    return model, kept


def _of_part(method: LinearMethod, part: str) -> LinearMethod:
    """Return the method of a part of a layer, by what checkpoints call it."""
    if isinstance(method, SeparatePartsMethod):
        return method.methods[part.rpartition(".")[2]]
    return method


def _set_tables(model: CheckpointModel, methods: Mapping[str, LinearMethod]) -> Iterator[str]:
    """Keep the embedding and the output matrix quantized where they can be; yield their names."""
    is_tied = isinstance(model, CausalLM) and model.is_tied
    for name, layer in list(model.named_modules()):
        method = methods.get(name)
        if method is None or not isinstance(layer, VocabParallelEmbedding):
            continue
        if isinstance(method, BlockMethod):
            method = BlockEmbeddingMethod(method.format)
        elif not isinstance(layer, ParallelLMHead) or not _is_by_rows(method):
            continue  # rows of other forms are not looked up, and blocks of rows not padded
        if not (is_tied and isinstance(layer, ParallelLMHead)):
            layer.set_quant_method(method)
            yield name
            if is_tied and isinstance(model, CausalLM):
                model.lm_head.set_quant_method(method)
                model.lm_head.tie_weights(layer)


def _is_by_rows(method: LinearMethod) -> bool:
    """Whether each row has its own parameters."""
    if not isinstance(method, W8A8Method):
        return True
    return method.block_rows is None and not method.activations.is_static


def part_names(model: CheckpointModel, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what checkpoints call the parts of a layer, with the layer's own names for them."""
    parent, dot, last = name.rpartition(".")
    for part, shard in model.merged.get(last, {last: None}).items():
        yield f"{parent}{dot}{part}", shard


def _method(
    layer: LinearBase, parts: Mapping[str, Any], methods: Mapping[str, LinearMethod]
) -> LinearMethod:
    """Return how *layer* keeps its weights.

    Parts of one form share a product. Parts of different forms, as GGUF has them in one layer, and
    parts that reorder their inputs, keep their own products.
    """
    chosen = [methods.get(part) for part in parts]
    first, sizes = chosen[0], layer.output_partition_sizes
    if all(method == first for method in chosen):
        is_ordered = isinstance(first, GroupedInt4Method) and first.is_ordered
        if len(chosen) == 1 or not is_ordered:
            return for_outputs(first or UnquantizedLinearMethod(), sizes)
    assert isinstance(layer, ColumnParallelLinear), f"{layer} merges {list(parts)}"
    shards = {
        name.rpartition(".")[2]: (layer.parts[shard].index, layer.parts[shard].count)
        for name, shard in parts.items()
    }
    own = [m and for_outputs(m, [size]) for m, size in zip(chosen, sizes, strict=True)]
    return SeparatePartsMethod(dict(zip(shards, own, strict=True)), shards)
