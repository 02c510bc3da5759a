"""Create the rotary layer for a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor

from opweave.layers.errors import LayerArgumentError
from opweave.layers.registry import replacement
from opweave.layers.rotary.apply_rotary_emb import ApplyRotaryEmb
from opweave.layers.rotary.dual_chunk import DualChunkRotaryEmbedding
from opweave.layers.rotary.mrope import MRotaryEmbedding
from opweave.layers.rotary.parameters import RopeContext, flag, number, read_scaling, sections
from opweave.layers.rotary.rotary_embedding import RotaryEmbedding

Rope = RotaryEmbedding | DualChunkRotaryEmbedding
# Each with the tables it was made with: a model that is cast or moved takes its own along.
_made: dict[object, tuple[Rope, list[Tensor]]] = {}


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: Mapping[str, Any] | None = None,
    *,
    max_model_len: int | None = None,
) -> Rope:
    """Return the rotary layer for these arguments; equal arguments share a layer.

    If a model has cast or moved the tables of a layer since, a new one is created.

    Args:
        head_size: the size of a head.
        max_position: ``max_position_embeddings`` of the configuration.
        is_neox_style: the layout of the pairs.
        rope_parameters: as in Hugging Face configurations: ``rope_type`` (one of
            ``opweave.layers.rotary.ROPE_TYPES``), ``rope_theta`` (10000 by default),
            ``partial_rotary_factor`` or ``rope_dim`` (the rotated part of a head; for
            ``proportional``, the fraction of pairs that are rotated), the parameters of the type,
            and ``mrope_section`` for M-RoPE, which combines with every type.
        dtype: dtype of the table; by default, torch's default dtype.
        dual_chunk_attention_config: ``chunk_size`` and ``local_size``, for dual chunk attention.
        max_model_len: the maximum sequence length, by default *max_position*; it decides whether
            ``longrope`` uses its long or its short factors, and the base of ``dynamic``.

    Raises:
        LayerArgumentError: a parameter is missing, unknown, or out of range.
    """
    parameters = dict(rope_parameters or {})
    dtype = torch.get_default_dtype() if dtype is None else dtype
    cls: type[Rope] = RotaryEmbedding
    options: dict[str, Any]
    if dual_chunk_attention_config is not None:
        cls, options = DualChunkRotaryEmbedding, _dual_chunk(dual_chunk_attention_config)
    else:
        context = RopeContext(
            max_position, max_position if max_model_len is None else max_model_len
        )
        options = {"scaling": read_scaling(parameters, context)}
        section = sections(parameters)
        if section is not None:
            cls = MRotaryEmbedding
            options["mrope_section"] = section
            options["mrope_interleaved"] = flag(parameters, "mrope_interleaved", False)
    base = number(parameters, "rope_theta", 10000.0)
    size = _rotary_dim(head_size, parameters)
    sizes = (head_size, size, max_position, base, is_neox_style, dtype)
    # The layer also depends on the device, on replacements and on enabled layers.
    classes = tuple((replacement(c), c.enabled()) for c in (cls, ApplyRotaryEmb))
    key = (cls, sizes, tuple(options.items()), torch.get_default_device(), classes)
    rope, tables = _made.get(key, (None, []))
    if rope is None or not _has(rope, tables):
        rope = cls(*sizes, **options)
        _made[key] = rope, [*rope.buffers()]
    return rope


def _has(rope: Rope, tables: list[Tensor]) -> bool:
    """Whether *rope* still has these *tables*; a cast to another dtype and back changes them."""
    own = [*rope.buffers()]
    return len(own) == len(tables) and all(map(is_, own, tables))


def _rotary_dim(head_size: int, parameters: Mapping[str, Any]) -> int:
    if parameters.get("rope_dim") is not None:
        return int(number(parameters, "rope_dim"))
    share = number(parameters, "partial_rotary_factor", 1.0)
    if share > 1:
        raise LayerArgumentError(
            f"rope_parameters: partial_rotary_factor={share} must be above 0 and at most 1."
        )
    kind = parameters.get("rope_type", parameters.get("type"))
    return head_size if kind == "proportional" else int(head_size * share)


def _dual_chunk(config: Mapping[str, Any]) -> dict[str, Any]:
    wanted = ("chunk_size", "local_size")
    for key in wanted:
        found = config.get(key)
        if isinstance(found, bool) or not isinstance(found, int):
            raise LayerArgumentError(
                f"dual_chunk_attention_config: {key} must be an integer, found {found!r}."
            )
    return {key: config[key] for key in wanted}
