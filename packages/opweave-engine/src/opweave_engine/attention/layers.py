"""The caches of a model's layers, and groups of layers with the same retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opweave.layers.mamba.states import StateCache
from opweave.platforms import Platform
from opweave.platforms.spec import AttentionSpec
from opweave.plugins import resolve_obj_by_qualname
from opweave_engine.attention.backend import AttentionBackend
from opweave_engine.attention.batch import SequenceBatch
from opweave_engine.attention.specs import CacheSpec, StateSpaceSpec
from opweave_engine.cache import Retention, SequenceState
from opweave_engine.models.attention import Attention
from opweave_engine.models.latent_attention import LatentAttention


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same retention, which share block tables.

    Attributes:
        retention: the blocks of a sequence that they keep.
        layers: indices of attention layers, or names of stateful layers.
        block_bytes: the size of one block in all layers together.
    """

    retention: Retention
    layers: tuple[int | str, ...]
    block_bytes: int


def layer_groups(specs: Mapping[int | str, CacheSpec], block_size: int) -> list[LayerGroup]:
    """Group layers by retention."""
    members: dict[Retention, list[int | str]] = {}
    for layer, spec in specs.items():
        members.setdefault(spec.retention, []).append(layer)
    return [
        LayerGroup(
            retention,
            tuple(layers),
            sum(specs[layer].block_bytes(block_size) for layer in layers),
        )
        for retention, layers in members.items()
    ]


class LayerCaches:
    """The memory of every layer.

    Args:
        model: the model.
        specs: the cache specification of each layer.
        groups: the layers, grouped.
        num_blocks: the number of blocks per group, without the null block.
        block_size: tokens per block.
        platform: names the attention backends.
        device: the device of the caches.

    Attributes:
        backends: the backend of each attention layer, by index.
        states: the states of stateful layers; None if there are no such layers.
        state_group: the index of the group of stateful layers.

    Raises:
        UnsupportedCacheError: a backend does not support the specification of a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[int | str, CacheSpec],
        groups: Sequence[LayerGroup],
        num_blocks: Sequence[int],
        block_size: int,
        platform: Platform,
        device: torch.device,
    ) -> None:
        modules = {
            module.layer: module
            for module in model.modules()
            if isinstance(module, Attention | LatentAttention)
        }
        self.backends: dict[int, AttentionBackend] = {}
        self._group_of: dict[int, int] = {}
        self.states: StateCache | None = None
        self.state_group: int | None = None
        for index, (group, count) in enumerate(zip(groups, num_blocks, strict=True)):
            if isinstance(group.retention, SequenceState):
                self.states, self.state_group = StateCache(count + 1), index
            for layer in group.layers:
                spec = specs[layer]
                if isinstance(spec, StateSpaceSpec):
                    self._keep_states(str(layer), spec, device)
                    continue
                assert isinstance(layer, int), f"{layer=} attends, but has no index"
                chosen = _backend(modules[layer], spec, platform)
                self.backends[layer] = chosen(spec, count + 1, block_size, device)
                self._group_of[layer] = index

    def step(self, batches: Mapping[int, SequenceBatch]) -> StepAttention:
        """Return the attention of one forward pass.

        Args:
            batches: the sequences for each group of attention layers.
        """
        built: dict[tuple[int, type], Any] = {}
        metadata = {}
        for layer, backend in self.backends.items():
            key = self._group_of[layer], type(backend)
            if key not in built:
                built[key] = backend.build_metadata(batches[key[0]])
            metadata[layer] = built[key]
        return StepAttention(self.backends, metadata)

    def _keep_states(self, layer: str, spec: StateSpaceSpec, device: torch.device) -> None:
        assert self.states is not None  # its group is one of states
        for state in spec.states:
            self.states.get(layer, state.kind, state.shape, state.dtype, device)


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
    wanted = AttentionSpec(
        num_heads=module.num_heads,
        num_kv_heads=rows.num_heads,
        head_size=rows.key_size,
        dtype=spec.dtype,
        window=rows.window,
        scale=module.scale if isinstance(module, Attention) else None,
        soft_cap=module.soft_cap if isinstance(module, Attention) else None,
        is_latent=isinstance(module, LatentAttention),
    )
    found: type[AttentionBackend] = resolve_obj_by_qualname(platform.get_attn_backend_cls(wanted))
    return found
