"""``/v1/models``."""

from __future__ import annotations

from typing import Literal

from opweave_engine.server.protocol.base import ResponseBody


class ModelCard(ResponseBody):
    """A served model name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "opweave"
    root: str
    max_model_len: int


class ModelList(ResponseBody):
    """All served model names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
