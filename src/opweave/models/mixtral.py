"""Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from opweave.models.mixture import MixtureForCausalLM
from opweave.models.mixture_config import MixtureConfig
from opweave.models.weights import Place


class MixtralForCausalLM(MixtureForCausalLM):
    """A Mixtral language model: every layer has experts."""

    experts: ClassVar[tuple[str, str, str]] = ("w1", "w2", "w3")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(MixtureConfig.mixtral(config), dtype=dtype)

    def places(self) -> dict[str, Place]:
        named = super().places()
        return {name.replace(".mlp.", ".block_sparse_moe."): named[name] for name in named}
