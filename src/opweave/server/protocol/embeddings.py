"""``/v1/embeddings``."""

from __future__ import annotations

from typing import Literal

from opweave.server.protocol.base import Input, RequestBody, ResponseBody, Text


class EmbeddingRequest(RequestBody):
    """Turn texts into vectors."""

    endpoint = "embeddings"

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Text | None = None


class Embedding(ResponseBody):
    """The vector of one text; in base64, of little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseBody):
    """Tokens of the texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(ResponseBody):
    """The vectors, in the order of the texts."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
