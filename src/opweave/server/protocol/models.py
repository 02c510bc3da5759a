"""``/v1/models``."""

from __future__ import annotations

from typing import Literal

from opweave.server.protocol.base import ResponseBody


class ModelCard(ResponseBody):
    """A name by which the model can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "opweave"
    root: str
    max_model_len: int


class ModelList(ResponseBody):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
