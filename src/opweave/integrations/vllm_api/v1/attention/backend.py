"""Base classes of attention backends."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["AttentionMetadata", "AttentionType"]


class AttentionMetadata:
    """Base class of the metadata of an attention backend."""


class AttentionType(StrEnum):
    """The kind of attention of a layer."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"
