"""Shard the linear layers of a transformers model over tensor-parallel ranks.

The model's plan lists the layers and their styles, by patterns such as
``model.layers.*.self_attn.q_proj``. Layers without an entry, and experts, are replicated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from opweave.layers.errors import ShardingError
from opweave.layers.parallel import TensorParallel

# Parts of the output, which the next layer takes or which are gathered.
_COLUMNS, _GATHERED_COLUMNS = "colwise", "colwise_gather_output"
# Parts of the input, which the layer before gives or which are taken here. The results are added.
_ROWS, _SPLIT_ROWS = "rowwise", "rowwise_split_input"
_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_ranks(model: Any, size: int) -> None:
    """Check that *model* can be divided over *size* ranks; it may be on the meta device.

    Raises:
        ShardingError: it cannot.
    """
    name, planned = type(model).__name__, dict(_planned(model))
    if not {style for _, style in planned.values()} & {_COLUMNS, _ROWS, _SPLIT_ROWS}:
        raise ShardingError(
            f"{name} runs by transformers' code, whose tensor-parallel plan does not divide its "
            f"layers, so that it cannot run on {size} ranks. Use tensor_parallel_size=1."
        )
    parallel = TensorParallel(0, size, _not_called, _not_called)
    text = model.config.get_text_config(decoder=True)
    for heads in _HEADS:
        if (count := getattr(text, heads, None)) is not None:
            parallel.divide(count, heads)
    for path, (layer, style) in planned.items():
        if style in (_COLUMNS, _ROWS):
            parallel.divide(_size(layer, style), f"a dimension of {path}")


def shard(model: Any, parallel: TensorParallel) -> None:
    """Keep this rank's part of each layer in the plan, with the collectives that it needs.

    Raises:
        ShardingError: it cannot be divided.
    """
    if parallel.size == 1:
        return
    check_ranks(model, parallel.size)
    for _, (layer, style) in list(_planned(model)):
        if _size(layer, style) % parallel.size:
            continue  # of a style that whole layers fit, too
        if style in (_COLUMNS, _GATHERED_COLUMNS):
            _keep_columns(layer, parallel)
        else:
            _keep_rows(layer, parallel)
        if style == _GATHERED_COLUMNS:
            layer.register_forward_hook(_after(parallel.all_gather))
        if style == _SPLIT_ROWS:
            layer.register_forward_pre_hook(partial(_split, parallel=parallel))


def _planned(model: Any) -> Iterator[tuple[str, tuple[nn.Linear, str]]]:
    """Yield the linear layers in the plan, with their paths and styles."""
    plan = getattr(model, "tp_plan", None) or {}
    for path, module in model.named_modules():
        style = str(plan.get(re.sub(r"\b\d+\b", "*", path)))
        known = style in (_COLUMNS, _GATHERED_COLUMNS, _ROWS, _SPLIT_ROWS)
        if known and isinstance(module, nn.Linear):
            yield path, (module, style)


def _size(layer: nn.Linear, style: str) -> int:
    return layer.out_features if style in (_COLUMNS, _GATHERED_COLUMNS) else layer.in_features


def _keep_columns(layer: nn.Linear, parallel: TensorParallel) -> None:
    layer.out_features //= parallel.size
    layer.weight = _part(layer.weight, 0, parallel)
    if layer.bias is not None:
        layer.bias = _part(layer.bias, 0, parallel)


def _keep_rows(layer: nn.Linear, parallel: TensorParallel) -> None:
    layer.in_features //= parallel.size
    layer.weight = _part(layer.weight, 1, parallel)
    if layer.bias is not None and parallel.rank > 0:  # the sum has it once
        layer.register_parameter("bias", None)
    layer.register_forward_hook(_after(parallel.all_reduce))


def _part(whole: Tensor, dim: int, parallel: TensorParallel) -> nn.Parameter:
    part = whole.data.chunk(parallel.size, dim)[parallel.rank]
    return nn.Parameter(part.clone(), requires_grad=False)


def _after(collective: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, inputs, output: collective(output)


def _split(module: nn.Module, inputs: tuple[Tensor], *, parallel: TensorParallel) -> Tensor:
    return inputs[0].chunk(parallel.size, -1)[parallel.rank]


def _not_called(x: Tensor, dim: int = -1) -> Tensor:
    raise AssertionError("a model that is only checked needs no other ranks")
