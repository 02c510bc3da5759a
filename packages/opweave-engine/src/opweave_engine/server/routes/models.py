"""``GET /v1/models``."""

from __future__ import annotations

from fastapi import APIRouter

from opweave_engine.server.protocol.models import ModelCard, ModelList
from opweave_engine.server.routes.responses import ERRORS
from opweave_engine.server.state import Server, ServerState

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.get("/v1/models")
async def models(server: Server) -> ModelList:
    """List the served model names."""
    return ModelList(data=[_card(name, server) for name in server.model_names])


@router.get("/v1/models/{model:path}")
async def model(model: str, server: Server) -> ModelCard:
    """Return one model."""
    server.check_model(model)
    return _card(model, server)


def _card(name: str, server: ServerState) -> ModelCard:
    engine = server.engine
    return ModelCard(
        id=name,
        created=server.created,
        root=engine.model_name,
        max_model_len=engine.max_model_len,
    )
