"""Builds models whose linear layers keep the weights of a checkpoint quantized."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from opweave.engine.loading.build import build
from opweave.engine.loading.sources import QuantizedSource, TensorSource
from opweave.layers import ParallelLMHead, VocabParallelEmbedding
from opweave.layers.block_embedding import BlockEmbeddingMethod
from opweave.layers.linear import ColumnParallelLinear, LinearBase, LinearMethod
from opweave.layers.linear.low_bit import BlockMethod, GroupedInt4Method, SeparatePartsMethod
from opweave.layers.linear.method import UnquantizedLinearMethod, deferred_weights
from opweave.models import CausalLM, CheckpointModel

_log = logging.getLogger(__name__)


def build_quantized(
    config: Mapping[str, Any], dtype: torch.dtype, sources: Sequence[TensorSource]
) -> tuple[CheckpointModel, frozenset[str]]:
    """Build a model for the weights of *sources*, which are not loaded yet.

    Returns:
        The model, and the modules that keep a quantized weight, by their names in the checkpoint.
        Quantized weights of all others, such as experts, are to be dequantized.
    """
    methods: dict[str, LinearMethod] = {}
    for source in sources:
        if isinstance(source, QuantizedSource):
            methods |= source.methods
    if not methods:
        return build(config, dtype), frozenset()
    with deferred_weights():
        model = build(config, dtype)
    names = {model.own_name(name): name for name in methods}
    own = {model.own_name(name): method for name, method in methods.items()}
    kept: set[str] = set()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LinearBase):
            parts = dict(part_names(model, name))
            layer.prefix = layer.prefix or name  # for errors
            found = {} if name.rpartition(".")[2] in model.dense else own
            layer.set_quant_method(_method(layer, parts, found))
            kept |= {names[part] for part in parts if part in found}
    kept |= {names[name] for name in _set_tables(model, own)}
    model.requires_grad_(False)
    if left := methods.keys() - kept:
        kinds = Counter(name.rpartition(".")[2] for name in left)
        _log.warning(
            "%d quantized weights are dequantized to %s while they are loaded, because their "
            "layers have no quantized form: %s",
            len(left), str(dtype).removeprefix("torch."),
            ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items())),
        )  # fmt: skip
    return model, frozenset(kept)


def _set_tables(model: CheckpointModel, methods: Mapping[str, LinearMethod]) -> Iterator[str]:
    """Keep the embedding and the output matrix quantized where they can be; yield their names."""
    is_tied = isinstance(model, CausalLM) and model.is_tied
    for name, layer in list(model.named_modules()):
        method = methods.get(name)
        if method is None or not isinstance(layer, VocabParallelEmbedding):
            continue
        if isinstance(method, BlockMethod):
            method = BlockEmbeddingMethod(method.format)
        elif not isinstance(layer, ParallelLMHead):
            continue  # rows of other forms are not looked up
        if not (is_tied and isinstance(layer, ParallelLMHead)):
            layer.set_quant_method(method)
            yield name
            if is_tied and isinstance(model, CausalLM):
                model.lm_head.set_quant_method(method)
                model.lm_head.tie_weights(layer)


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
    first = chosen[0]
    if all(method == first for method in chosen):
        is_ordered = isinstance(first, GroupedInt4Method) and first.is_ordered
        if len(chosen) == 1 or not is_ordered:
            return first or UnquantizedLinearMethod()
    assert isinstance(layer, ColumnParallelLinear), f"{layer} merges {list(parts)}"
    shards = {
        name.rpartition(".")[2]: (layer.parts[shard].index, layer.parts[shard].count)
        for name, shard in parts.items()
    }
    return SeparatePartsMethod(dict(zip(shards, chosen, strict=True)), shards)
