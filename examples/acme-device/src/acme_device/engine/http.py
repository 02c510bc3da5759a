"""The HTTP route: ``GET /acme/device`` says how the device is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from fastapi import APIRouter

import acme_device
from acme_device.engine.usage import usage
from opweave import platforms
from opweave_engine import EngineClient


def router(engine: EngineClient) -> APIRouter:
    """Return the route for the server of *engine*; none on another platform than acme."""
    api = APIRouter(prefix="/acme", tags=["acme"])
    if platforms.current_platform.name != "acme":
        return api

    @api.get("/device")
    def device() -> dict[str, Any]:
        """Say how the device is, and what its parts of the engine have done."""
        free, total = torch.acme.mem_get_info()
        return {
            "device": f"acme:{torch.acme.current_device()}",
            "model": engine.model_name,
            "memory": {"free": free, "total": total},
            "ran_on_host": acme_device.fallbacks(),
            **asdict(usage),
        }

    return api
