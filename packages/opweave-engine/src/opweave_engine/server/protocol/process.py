"""``/v1/process``."""

from __future__ import annotations

from typing import Any, Literal

from opweave_engine.server.protocol.base import RequestBody, ResponseBody
from opweave_engine.server.protocol.sampling import CacheSalt, Priority


class ProcessRequest(RequestBody):
    """A request in the format of an I/O processor."""

    endpoint = "process"

    data: Any
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class ProcessResponse(ResponseBody):
    """The result of the I/O processor."""

    id: str
    object: Literal["process"] = "process"
    created: int
    model: str
    data: Any
