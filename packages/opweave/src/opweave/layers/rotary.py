"""Rotary position embedding: the layers, and the scalings for longer contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import is_, mul
from typing import Any

import torch
from torch import Tensor

from opweave import ir
from opweave.layers import rotary_scaling
from opweave.layers.custom_op import CustomOp
from opweave.layers.registry import LayerArgumentError, replacement

# Rotation by given angles.


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(CustomOp):
    """Rotates pairs of dimensions by given angles: ``ir.ops.apply_rotary_emb``.

    Args:
        enforce_enable: run the platform's method regardless of the configuration.
        is_neox_style: pair dimension ``i`` with ``i + r / 2``; otherwise ``2 * i`` with
            ``2 * i + 1``.
        enable_fp32_compute: compute in float32; otherwise in the dtype of the input.
    """

    def __init__(
        self,
        enforce_enable: bool = False,
        is_neox_style: bool = True,
        enable_fp32_compute: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style, self.enable_fp32_compute = is_neox_style, enable_fp32_compute

    def forward_native(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate *x*, ``(..., tokens, heads, head_size)``, by angles ``(tokens, r / 2)``."""
        return self._run(ir.ops.apply_rotary_emb.native, x, cos, sin)

    def forward_cuda(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._run(ir.ops.apply_rotary_emb, x, cos, sin)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _run(self, op: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return op(x, cos, sin, self.is_neox_style, self.enable_fp32_compute)

    def extra_repr(self) -> str:
        return f"is_neox_style={self.is_neox_style}, fp32_compute={self.enable_fp32_compute}"


# Rotary embedding with a table of cosines and sines.


_NO_SCALING = rotary_scaling.Scaling()


@CustomOp.register("rotary_embedding")
class RotaryEmbedding(CustomOp):
    """Rotates queries and keys by their positions: ``ir.ops.rotary_embedding``.

    ``cos_sin_cache``, ``(positions, rotary_dim)``, is a non-persistent buffer.

    Args:
        head_size: the size of a head.
        rotary_dim: the number of leading dimensions of a head that are rotated; even.
        max_position_embeddings: the number of positions in the model's configuration; a scaling may
            make the table longer.
        base: the base of the frequencies.
        is_neox_style: pair dimension ``i`` with ``i + rotary_dim / 2``; otherwise ``2 * i`` with
            ``2 * i + 1``.
        dtype: dtype of the table, which is computed in float32.
        init_cache: create the table; False for subclasses that create their own.
        scaling: the scaling of frequencies and table; none by default.

    Raises:
        LayerArgumentError: *rotary_dim* is odd, or not between 2 and *head_size*.

    Source: Su et al., "RoFormer", arXiv:2104.09864.
    """

    cos_sin_cache: Tensor

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float,
        is_neox_style: bool, dtype: torch.dtype, init_cache: bool = True, *,
        scaling: rotary_scaling.Scaling = _NO_SCALING,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(head_size, rotary_dim)
        self.head_size, self.rotary_dim = head_size, rotary_dim
        self.max_position_embeddings, self.base = max_position_embeddings, base
        self.is_neox_style, self.dtype, self.scaling = is_neox_style, dtype, scaling
        if init_cache:
            self.make_cache(scaling.rows(max_position_embeddings))

    def make_cache(self, rows: int) -> None:
        """Make the table for positions below *rows*, on the default device."""
        device = torch.get_default_device()
        if device.type == "meta":  # sizes that are not checked yet may ask for any amount of memory
            table = torch.empty(rows, self.rotary_dim, dtype=self.dtype)
        else:
            frequencies = self.scaling.frequencies(self.rotary_dim, self.base)
            table = rotary_scaling.cos_sin_table(frequencies, rows, self.scaling.magnitude)
            table = table.to(device=device, dtype=self.dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate.

        Args:
            positions: ``(...)``, integer.
            query: ``(..., query_heads * head_size)`` or ``(..., query_heads, head_size)``; its
                leading dimensions and those of the positions may be flattened differently.
            key: the same with the number of key heads, or None.

        Returns:
            The rotated queries and keys, in the shapes and dtypes of the inputs.

        Raises:
            LayerArgumentError: the leading dimensions do not match the number of positions.
        """
        xs = [query] if key is None else [query, key]
        shapes = [x.shape for x in xs]
        tokens, xs = align(positions, xs)
        rotated = [
            ir.ops.rotary_embedding_single.native(
                x, tokens, self._table(x), self.head_size, self.is_neox_style
            )
            for x in xs
        ]
        return _as_given(rotated, shapes)

    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate and donate queries and keys: do not use them afterwards."""
        xs = [query] if key is None else [query, key]
        shapes = [x.shape for x in xs]  # in a graph, asking what is donated counts as a use
        tokens, xs = align(positions, xs)
        rest = (tokens, self._table(query), self.head_size, self.is_neox_style)
        if key is None:
            rotated = [ir.ops.rotary_embedding_single.maybe_inplace(*xs, *rest)]
        else:
            rotated = ir.ops.rotary_embedding.maybe_inplace(*xs, *rest)
        return _as_given(rotated, shapes)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _table(self, x: Tensor) -> Tensor:
        # Moving the buffer itself would be a side effect in a compiled graph.
        return self.cos_sin_cache.to(x.device)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"is_neox_style={self.is_neox_style}, scaling={self.scaling}"
        )


def check_sizes(head_size: int, rotary_dim: int) -> None:
    """Raise LayerArgumentError unless *rotary_dim* is valid for the head size."""
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_size:
        raise LayerArgumentError(
            f"rotary_dim={rotary_dim} must be an even number from 2 to head_size={head_size}."
        )


def align(positions: Tensor, xs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return *positions* and *xs* with the same leading dimensions, as views where possible.

    Raises:
        LayerArgumentError: the leading dimensions of a tensor do not match the number of positions.
    """
    if all(x.ndim > positions.ndim and x.shape[: positions.ndim] == positions.shape for x in xs):
        return positions, [*xs]
    return positions.flatten(), [_token_rows(positions, x) for x in xs]


def _token_rows(positions: Tensor, x: Tensor) -> Tensor:
    for last, count in enumerate(accumulate(x.shape[:-1], mul)):
        if count == positions.numel():
            return x.flatten(0, last)
    raise LayerArgumentError(
        f"rotary embedding: positions of shape {tuple(positions.shape)} do not fit a tensor of "
        f"shape {tuple(x.shape)}, whose first dimensions should hold one token for each."
    )


def _as_given(
    rotated: Sequence[Tensor], shapes: Sequence[torch.Size]
) -> tuple[Tensor, Tensor | None]:
    query, *keys = (x.reshape(shape) for x, shape in zip(rotated, shapes, strict=True))
    return query, keys[0] if keys else None


# Rotary embedding with positions in time, height and width (M-RoPE).


AXES = 3
# The time of a long video may run ahead of the number of its tokens.
_ROWS_PER_POSITION = 4


class MRotaryEmbedding(RotaryEmbedding):
    """M-RoPE: each pair of dimensions is rotated by one of three positions of a token.

    The three positions of a text token are equal, so text may pass one position per token.

    Args:
        mrope_section: the numbers of pairs rotated by time, height and width; their sum is
            ``rotary_dim / 2``.
        mrope_interleaved: pairs alternate between the axes as long as each section lasts, and the
            remaining pairs use time; False: the sections follow each other.

    The other arguments, and the table, are those of :class:`RotaryEmbedding`; the table has four
    times as many positions.

    Raises:
        LayerArgumentError: the sections do not add up to ``rotary_dim / 2``.

    Source: Qwen2-VL, arXiv:2409.12191; interleaved: Qwen3-VL, arXiv:2511.21631.
    """

    axes: Tensor

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float,
        is_neox_style: bool, dtype: torch.dtype, mrope_section: Sequence[int],
        mrope_interleaved: bool = False, *, scaling: rotary_scaling.Scaling = _NO_SCALING,
    ) -> None:  # fmt: skip
        sizes = (head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        super().__init__(*sizes, init_cache=False, scaling=scaling)
        section = tuple(mrope_section)
        if len(section) != AXES or sum(section) != rotary_dim // 2:
            raise LayerArgumentError(
                f"mrope_section={[*section]} must be three numbers with the sum {rotary_dim // 2}, "
                f"half of rotary_dim."
            )
        self.mrope_section, self.mrope_interleaved = section, mrope_interleaved
        self.apply_rotary_emb = ApplyRotaryEmb(is_neox_style=is_neox_style)
        self.make_cache(_ROWS_PER_POSITION * self.scaling.rows(max_position_embeddings))
        pairs = [axis for axis, size in enumerate(section) for _ in range(size)]
        if mrope_interleaved:
            pairs = _interleaved(section)
        # Cosines and sines of a pair turn together.
        axes = torch.tensor([pairs + pairs], device=self.cos_sin_cache.device)
        self.register_buffer("axes", axes, persistent=False)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate.

        Args:
            positions: ``(3, tokens)``, integer: time, height and width; or ``(tokens,)``.
            query: ``(tokens, heads * head_size)`` or ``(tokens, heads, head_size)``.
            key: the same with the number of key heads, or None.

        Returns:
            The rotated queries and keys, in the shapes and dtypes that came in.

        Raises:
            LayerArgumentError: the positions have another shape.
        """
        if positions.ndim == 1:
            return super().forward_native(positions, query, key)
        return self._rotated(positions, query, key, self.apply_rotary_emb.forward_native)

    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate and donate queries and keys: do not use them afterwards."""
        if positions.ndim == 1:
            return super().forward_cuda(positions, query, key)
        return self._rotated(positions, query, key, self.apply_rotary_emb)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _rotated(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        rotate: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        cos, sin = self._angles(positions, query)
        xs = [query] if key is None else [query, key]
        rotated = [rotate(self._heads(x), cos, sin) for x in xs]
        return _as_given(rotated, [x.shape for x in xs])

    def _angles(self, positions: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, ``(tokens, rotary_dim / 2)`` each."""
        if positions.ndim != 2 or positions.shape[0] != AXES:
            raise LayerArgumentError(
                f"M-RoPE takes positions of shape (3, tokens) or (tokens,), found "
                f"{tuple(positions.shape)}."
            )
        by_axis = self._table(query)[positions]
        axes = self.axes.to(query.device).expand(1, positions.shape[1], -1)
        cos, sin = by_axis.gather(0, axes)[0].chunk(2, dim=-1)
        return cos, sin

    def _heads(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return x
        return torch.unflatten(x, -1, (x.shape[-1] // self.head_size, self.head_size))


def _interleaved(section: Sequence[int]) -> list[int]:
    """Return the axis of each pair: ``p % AXES`` while that section lasts, else time."""
    pairs = range(sum(section))
    return [p % AXES if p // AXES < section[p % AXES] else 0 for p in pairs]


# Rotation for dual chunk attention.


@CustomOp.register("dual_chunk_rotary_embedding")
class DualChunkRotaryEmbedding(CustomOp):
    """Rotates keys once and queries five times: ``ir.ops.dual_chunk_rotary_embedding``.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in
            :class:`RotaryEmbedding`. The table has ``2 * chunk_size - local_size`` rows,
            independent of the number of positions.
        chunk_size: the number of positions that a query distinguishes.
        local_size: the overlap of neighboring chunks; at least 0, less than *chunk_size*.

    Raises:
        LayerArgumentError: a size is out of range.

    Source: An et al., arXiv:2402.17463; Qwen2.5-1M, arXiv:2501.15383.
    """

    cos_sin_cache: Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        chunk_size: int,
        local_size: int,
    ) -> None:
        super().__init__()
        check_sizes(head_size, rotary_dim)
        if not 0 <= local_size < chunk_size:
            raise LayerArgumentError(
                f"local_size={local_size} must be from 0 and less than chunk_size={chunk_size}."
            )
        self.head_size, self.rotary_dim = head_size, rotary_dim
        self.max_position_embeddings, self.base = max_position_embeddings, base
        self.is_neox_style, self.dtype = is_neox_style, dtype
        self.chunk_size, self.local_size = chunk_size, local_size
        table = rotary_scaling.cos_sin_table(
            rotary_scaling.Scaling().frequencies(rotary_dim, base), 2 * chunk_size - local_size
        )
        table = table.to(device=torch.get_default_device(), dtype=dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate.

        Args:
            positions: ``(...)``, integer.
            query: ``(..., query_heads * head_size)`` or ``(..., query_heads, head_size)``.
            key: the same with the number of key heads.
            offsets: added to the positions.

        Returns:
            Queries for the own chunk, the previous one, all earlier ones, and the last two in the
            critical form, concatenated: ``(..., 5 * query_heads * head_size)``; and the keys,
            ``(..., key_heads * head_size)``.
        """
        return self._run(ir.ops.dual_chunk_rotary_embedding.native, positions, query, key, offsets)

    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._run(ir.ops.dual_chunk_rotary_embedding, positions, query, key, offsets)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _run(
        self,
        op: Callable[..., tuple[Tensor, Tensor]],
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        positions = positions if offsets is None else positions + offsets
        sizes = (self.head_size, self.chunk_size, self.local_size)
        table = self.cos_sin_cache.to(query.device)
        return op(query, key, positions, table, *sizes, self.is_neox_style)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"chunk_size={self.chunk_size}, local_size={self.local_size}"
        )


# Create the rotary layer for a model's configuration.


Rope = RotaryEmbedding | DualChunkRotaryEmbedding
# Each with the tables it was made with: a model that is cast or moved takes its own along.
_shared_layers: dict[object, tuple[Rope, list[Tensor]]] = {}


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
            ``opweave.layers.rotary_scaling.ROPE_TYPES``), ``rope_theta`` (10000 by default),
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
        context = rotary_scaling.RopeContext(
            max_position, max_position if max_model_len is None else max_model_len
        )
        options = {"scaling": rotary_scaling.read_scaling(parameters, context)}
        section = rotary_scaling.sections(parameters)
        if section is not None:
            cls = MRotaryEmbedding
            options["mrope_section"] = section
            options["mrope_interleaved"] = rotary_scaling.flag(
                parameters, "mrope_interleaved", False
            )
    base = rotary_scaling.number(parameters, "rope_theta", 10000.0)
    size = _rotary_dim(head_size, parameters)
    sizes = (head_size, size, max_position, base, is_neox_style, dtype)
    # The layer also depends on the device, on replacements and on enabled layers.
    classes = tuple((replacement(c), c.enabled()) for c in (cls, ApplyRotaryEmb))
    key = (cls, sizes, tuple(options.items()), torch.get_default_device(), classes)
    rope, tables = _shared_layers.get(key, (None, []))
    if rope is None or not _has(rope, tables):
        rope = cls(*sizes, **options)
        _shared_layers[key] = rope, [*rope.buffers()]
    return rope


def _has(rope: Rope, tables: list[Tensor]) -> bool:
    """Whether *rope* still has these *tables*; a cast to another dtype and back changes them."""
    current = [*rope.buffers()]
    return len(current) == len(tables) and all(map(is_, current, tables))


def _rotary_dim(head_size: int, parameters: Mapping[str, Any]) -> int:
    if parameters.get("rope_dim") is not None:
        return int(rotary_scaling.number(parameters, "rope_dim"))
    share = rotary_scaling.number(parameters, "partial_rotary_factor", 1.0)
    if share > 1:
        raise LayerArgumentError(
            f"rope_parameters: partial_rotary_factor={share} must be above 0 and at most 1."
        )
    kind = parameters.get("rope_type", parameters.get("type"))
    return head_size if kind == "proportional" else int(head_size * share)


def _dual_chunk(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("chunk_size", "local_size")
    for key in keys:
        size = config.get(key)
        if isinstance(size, bool) or not isinstance(size, int):
            raise LayerArgumentError(
                f"dual_chunk_attention_config: {key} must be an integer, found {size!r}."
            )
    return {key: config[key] for key in keys}
