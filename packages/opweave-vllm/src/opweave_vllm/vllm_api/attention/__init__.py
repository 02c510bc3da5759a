"""Attention, by the module names of earlier versions of vLLM."""

from opweave_vllm.vllm_api.v1.attention.backend import AttentionMetadata, AttentionType

__all__ = ["AttentionMetadata", "AttentionType"]
