"""Qwen3 with a mixture of experts (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from opweave_engine.models.mixture import MixtureForCausalLM
from opweave_engine.models.mixture_config import MixtureConfig


class Qwen3MoeForCausalLM(MixtureForCausalLM):
    """A Qwen3-MoE language model: some layers have experts, the others an MLP."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(MixtureConfig.qwen3_moe(config), dtype=dtype)
