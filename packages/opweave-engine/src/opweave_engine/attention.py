"""Attention to cached tokens: specifications, the interface of backends, and the default ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.rules import BATCH_INVARIANT
from opweave.layers.mamba_states import StateCache, StatefulLayer, state_dtype
from opweave.layers.registry import DuplicateLayerError
from opweave.platforms import Platform
from opweave.platforms.base import AttentionSpec
from opweave_engine import kv_cache
from opweave_engine.errors import UnsupportedCacheError
from opweave_engine.load import loader
from opweave_engine.models.blocks import Attention, LatentAttention
from opweave_engine.parts import part

# Cache specifications: the state that each layer keeps of computed tokens.


@dataclass(frozen=True)
class FullAttentionSpec:
    """Keys and values of every token.

    Attributes:
        num_kv_heads: the number of key and value heads on this rank.
        key_size, value_size: the sizes of a head.
        dtype: the dtype of keys and values.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def retention(self) -> kv_cache.Retention:
        """Which blocks of a sequence are needed."""
        return kv_cache.EveryToken()

    def block_bytes(self, block_size: int) -> int:
        """Return the size of one block of *block_size* tokens."""
        row = self.num_kv_heads * (self.key_size + self.value_size)
        return block_size * row * self.dtype.itemsize


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last tokens.

    Attributes:
        window: the number of tokens, including the current one.
    """

    window: int

    @property
    def retention(self) -> kv_cache.Retention:
        return kv_cache.Window(self.window)


@dataclass(frozen=True)
class LatentAttentionSpec:
    """One row for all heads of every token: the latent vector and the rotated part of the key.

    Attributes:
        row_size: the size of the row.
        dtype: the dtype of the row.
    """

    row_size: int
    dtype: torch.dtype

    @property
    def retention(self) -> kv_cache.Retention:
        """Which blocks of a sequence are needed."""
        return kv_cache.EveryToken()

    def block_bytes(self, block_size: int) -> int:
        """Return the size of one block of *block_size* tokens."""
        return block_size * self.row_size * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """One kind of state.

    Attributes:
        kind: ``"conv"`` or ``"ssm"``.
        shape: the shape of one sequence's state.
        dtype: the dtype of the state.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StateSpaceSpec:
    """The states of a sequence, whose size does not depend on its length.

    Attributes:
        states: one of each kind.
    """

    states: tuple[StateSpec, ...]

    @property
    def retention(self) -> kv_cache.Retention:
        """One slot per sequence."""
        return kv_cache.SequenceState()

    def block_bytes(self, block_size: int) -> int:
        """Return the size of one sequence's states."""
        return sum(prod(state.shape) * state.dtype.itemsize for state in self.states)


CacheSpec = FullAttentionSpec | LatentAttentionSpec | StateSpaceSpec


def cache_specs(model: nn.Module, dtype: torch.dtype) -> dict[int | str, CacheSpec]:
    """Return the cache specification of each attention layer by index, and stateful layer by name.

    Args:
        model: the model, whose modules declare their requirements.
        dtype: the dtype of its activations.

    Raises:
        DuplicateLayerError: two layers have the same index or name, so they would share a cache.
    """
    specs: dict[int | str, CacheSpec] = {}
    holders: dict[int | str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Attention | LatentAttention | StatefulLayer):
            continue
        layer = module.prefix if isinstance(module, StatefulLayer) else module.cached.layer
        if layer in holders:
            raise DuplicateLayerError(
                f"{holders[layer]} and {name} are both layer {layer!r} to the cache, which would "
                "mix up what they keep. Give each layer of the model an index or prefix of its own."
            )
        specs[layer], holders[layer] = _spec(module, dtype), name
    return specs


def _spec(module: Attention | LatentAttention | StatefulLayer, dtype: torch.dtype) -> CacheSpec:
    if isinstance(module, StatefulLayer):
        shapes = module.state_shapes.items()
        return StateSpaceSpec(
            tuple(StateSpec(kind, shape, state_dtype(dtype, kind)) for kind, shape in shapes)
        )
    rows = module.cached
    if isinstance(module, LatentAttention):
        return LatentAttentionSpec(rows.key_size, dtype)
    sizes = rows.num_heads, rows.key_size, rows.value_size, dtype
    if rows.window is None:
        return FullAttentionSpec(*sizes)
    return SlidingWindowSpec(*sizes, rows.window)


# The sequences of one forward pass, for attention backends.


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Packed sequences, and the cache blocks of their earlier tokens in a group of layers.

    Sequences with one new token come first. The numbers in *query_starts* and *seq_lens* are noted:
    ``ir.host_lengths`` returns them without waiting for the device.

    Attributes:
        query_starts: ``(sequences + 1,)``, int32: the first new token of each sequence.
        seq_lens: ``(sequences,)``, int32: the length of each sequence, including new tokens.
        key_starts: ``(sequences + 1,)``, int32: the cumulative sums of *seq_lens*.
        block_tables: ``(sequences, max blocks)``, int32; 0 for blocks that are not needed.
        slot_mapping: ``(tokens,)``, int64: the cache slot of each new token, or -1.
        num_decodes: the number of leading sequences with one new token.
    """

    query_starts: Tensor
    seq_lens: Tensor
    key_starts: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    num_decodes: int

    @property
    def num_prefills(self) -> int:
        """The number of sequences with more than one new token."""
        return self.seq_lens.shape[0] - self.num_decodes


# The interface of attention backends: allocate a layer's cache, write to it, attend to it.


class AttentionBackend(ABC):
    """The cache of one layer, and attention over it.

    A platform names the class for each layer in ``get_attn_backend_cls``. An opaque op calls it, so
    it is not traced.

    Args:
        spec: the cache specification of the layer.
        num_blocks: the number of blocks, including the null block (0), which is never written.
        block_size: tokens per block.
        device: the device of the cache.

    Attributes:
        name: the name for users.
        block_multiple: *block_size* must be a multiple of this number.

    Raises:
        UnsupportedCacheError: the backend does not support *spec*.
    """

    name: ClassVar[str]
    block_multiple: ClassVar[int] = 1

    def __init__(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        reason = self.unsupported(spec)
        if block_size % self.block_multiple:
            reason = (
                f"its blocks hold a multiple of {self.block_multiple} tokens, not {block_size}: "
                "change block_size in the cache's configuration"
            )
        if reason is not None:
            raise UnsupportedCacheError(
                f"The attention backend {self.name!r} cannot keep {spec}: {reason}."
            )
        self.allocate(spec, num_blocks, block_size, device)

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        """Return why the backend does not support *spec*, or None if it does."""
        return None

    @classmethod
    def build_metadata(cls, batch: SequenceBatch) -> Any:
        """Return the data of a step for :meth:`forward`; called once for all layers of a group."""
        return batch

    @abstractmethod
    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        """Allocate the cache; the arguments are those of the class.

        The null block must hold zeros. Other blocks are written before they are read, so they need
        not be initialized, and the operating system can provide their memory lazily.
        """

    @abstractmethod
    def forward(self, metadata: Any, *inputs: Any, **options: Any) -> Tensor:
        """Write the new tokens into the cache, and attend to all of their sequences.

        Args:
            metadata: from :meth:`build_metadata`.
            inputs, options: the layer's arguments: query, key, value, scale, window and soft cap;
                for latent attention query, latent vector, rotated key part, the weight of ``kv_b``
                and scale.

        Returns:
            ``(T, heads, value_size)``.
        """


# Attention over a paged cache of keys and values, by IR ops.


class PagedAttention(AttentionBackend):
    """``reshape_and_cache``, then ``paged_attention``, on any device that has kernels for them."""

    name: ClassVar[str] = "paged"

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        return None if isinstance(spec, FullAttentionSpec) else "it keeps keys and values only"

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        assert isinstance(spec, FullAttentionSpec), f"unsupported() accepted {spec}"
        shape = num_blocks, spec.num_kv_heads, block_size
        self.key_cache, self.value_cache = (
            loader.empty((*shape, size), spec.dtype, device)
            for size in (spec.key_size, spec.value_size)
        )
        for cache in (self.key_cache, self.value_cache):
            cache[kv_cache.NULL_BLOCK].zero_()

    def forward(
        self,
        metadata: SequenceBatch,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        self.key_cache, self.value_cache = ir.ops.reshape_and_cache.maybe_inplace(
            key, value, self.key_cache, self.value_cache, metadata.slot_mapping
        )
        caches = self.key_cache, self.value_cache
        sequences = metadata.block_tables, metadata.seq_lens, metadata.query_starts
        attended: Tensor = ir.ops.paged_attention(
            query, *caches, *sequences, scale, True, window, soft_cap
        )
        return attended


# Latent attention over a paged cache of rows, by IR ops.


class LatentPagedAttention(AttentionBackend):
    """``mla_attention_decode`` for sequences with one new token, else ``mla_attention_prefill``.

    If batch invariance is required, prefill is used for all sequences: the two ops round
    differently, and whether a token is computed alone depends on the rest of the batch.
    """

    name: ClassVar[str] = "latent_paged"

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        return None if isinstance(spec, LatentAttentionSpec) else "it keeps latent rows only"

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        assert isinstance(spec, LatentAttentionSpec), f"unsupported() accepted {spec}"
        shape = num_blocks, 1, block_size
        self._rows = loader.empty((*shape, spec.row_size), spec.dtype, device)
        self._rows[kv_cache.NULL_BLOCK].zero_()
        self._no_values = self._rows.new_empty(*shape, 0)

    @classmethod
    def build_metadata(cls, batch: SequenceBatch) -> tuple[SequenceBatch, tuple[Tensor, ...]]:
        """Return the batch, and the tables, lengths and starts of its decodes."""
        if BATCH_INVARIANT in ir.policy_for(ir.ops.mla_attention_decode).required:
            batch = replace(batch, num_decodes=0)
        tables, lengths, starts = batch.block_tables, batch.seq_lens, batch.query_starts
        if batch.num_prefills:  # otherwise, the lengths are noted for these tensors
            noted, count = ir.host_lengths(lengths, starts), batch.num_decodes
            tables, lengths, starts = tables[:count], lengths[:count], starts[: count + 1]
            if noted is not None:
                numbers = noted.lengths[:count], noted.starts[: count + 1]
                ir.note_lengths(lengths, starts, *numbers)
        return batch, (tables, lengths, starts)

    def forward(
        self,
        metadata: tuple[SequenceBatch, tuple[Tensor, ...]],
        query: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_b_weight: Tensor,
        scale: float,
    ) -> Tensor:
        batch, decoding = metadata
        row = torch.cat((kv_c, k_pe), -1)[:, None]
        self._rows, self._no_values = ir.ops.reshape_and_cache.maybe_inplace(
            row, row[..., :0], self._rows, self._no_values, batch.slot_mapping
        )
        decodes, parts = batch.num_decodes, []
        if decodes or not batch.num_prefills:
            parts.append(
                ir.ops.mla_attention_decode(
                    query[:decodes], self._rows[:, 0], kv_b_weight, *decoding, scale
                )
            )
        if batch.num_prefills:
            rows = self._packed(batch)
            latents, rotated = rows.split_with_sizes([kv_c.shape[1], k_pe.shape[1]], -1)
            starts = batch.query_starts[decodes:] - decodes
            ends = batch.key_starts[decodes:] - batch.key_starts[decodes]
            parts.append(
                ir.ops.mla_attention_prefill(
                    query[decodes:], latents, rotated, kv_b_weight, starts, ends, scale
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _packed(self, batch: SequenceBatch) -> Tensor:
        """Return the rows of the sequences after the decodes, one after the other."""
        tables, lengths = batch.block_tables[batch.num_decodes :], batch.seq_lens
        rows = self._rows[tables, 0].flatten(1, 2)  # (sequences, positions, row)
        positions = torch.arange(rows.shape[1], device=rows.device)
        return rows[positions < lengths[batch.num_decodes :, None]]


# The caches of a model's layers, and groups of layers with the same retention.


def layer_groups(
    specs: Mapping[int | str, CacheSpec], block_size: int
) -> list[kv_cache.LayerGroup]:
    """Group layers by retention."""
    members: dict[kv_cache.Retention, list[int | str]] = {}
    for layer, spec in specs.items():
        members.setdefault(spec.retention, []).append(layer)
    return [
        kv_cache.LayerGroup(
            retention, tuple(layers), sum(specs[layer].block_bytes(block_size) for layer in layers)
        )
        for retention, layers in members.items()
    ]


class LayerCaches:
    """The memory of every layer.

    Args:
        model: the model.
        specs: the cache specification of each layer.
        groups: the layers, grouped.
        plan: the number of blocks of each group, without the null block, and their size.
        platform: names the attention backends.
        device: the device of the caches.

    Attributes:
        backends: the backend of each attention layer, by index.
        states: the states of stateful layers; None if there are no such layers.
        state_group: the index of the group of stateful layers.
        num_groups: the number of groups.

    Raises:
        UnsupportedCacheError: a backend does not support the specification of a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[int | str, CacheSpec],
        groups: Sequence[kv_cache.LayerGroup],
        plan: kv_cache.CachePlan,
        platform: Platform,
        device: torch.device,
    ) -> None:
        modules = {
            module.layer: module
            for module in model.modules()
            if isinstance(module, Attention | LatentAttention)
        }
        self.backends: dict[int, AttentionBackend] = {}
        self._kinds: dict[int, tuple[int, type[AttentionBackend]]] = {}
        self.states: StateCache | None = None
        self.state_group: int | None = None
        self.num_groups = len(groups)
        for index, (group, count) in enumerate(zip(groups, plan.num_blocks, strict=True)):
            if isinstance(group.retention, kv_cache.SequenceState):
                self.states, self.state_group = StateCache(count + 1), index
            for layer in group.layers:
                spec = specs[layer]
                if isinstance(spec, StateSpaceSpec):
                    assert self.states is not None  # its group is one of states
                    for state in spec.states:
                        self.states.get(str(layer), state.kind, state.shape, state.dtype, device)
                    continue
                assert isinstance(layer, int), f"{layer=} attends, but has no index"
                backend = _backend(modules[layer], spec, platform)
                self.backends[layer] = backend(spec, count + 1, plan.block_size, device)
                self._kinds[layer] = index, backend

    def step(self, batches: Mapping[int, SequenceBatch]) -> StepAttention:
        """Return the attention of one forward pass.

        Args:
            batches: the sequences for each group of attention layers.
        """
        kinds = self._kinds
        built = {kind: kind[1].build_metadata(batches[kind[0]]) for kind in set(kinds.values())}
        return StepAttention(self.backends, {layer: built[kind] for layer, kind in kinds.items()})


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention in one forward: the :class:`~opweave_engine.models.CachedAttention` of models.

    Attributes:
        backends: the backend of each layer.
        metadata: the backends' data of this step.
    """

    backends: Mapping[int, AttentionBackend]
    metadata: Mapping[int, Any]

    def attend(self, layer: int, *inputs: Any) -> Tensor:
        """Call the backend of a layer with the layer's *inputs*."""
        return self.backends[layer].forward(self.metadata[layer], *inputs)

    attend_latent = attend


def _backend(
    module: Attention | LatentAttention, spec: CacheSpec, platform: Platform
) -> type[AttentionBackend]:
    assert not isinstance(spec, StateSpaceSpec)
    rows = module.cached
    attention = AttentionSpec(
        num_heads=module.num_heads,
        num_kv_heads=rows.num_heads,
        head_size=rows.key_size,
        dtype=spec.dtype,
        window=rows.window,
        scale=module.scale if isinstance(module, Attention) else None,
        soft_cap=module.soft_cap if isinstance(module, Attention) else None,
        is_latent=isinstance(module, LatentAttention),
    )
    backend: type[AttentionBackend] = part(platform, "get_attn_backend_cls", attention)
    return backend
