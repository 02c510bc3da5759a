"""Health, version and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from opweave import __version__
from opweave_engine.server.ops import ops
from opweave_engine.server.plugin_list import plugins
from opweave_engine.server.routes.responses import ERRORS
from opweave_engine.server.state import Server

router = APIRouter(responses=ERRORS, tags=["Server"])


@router.get("/health")
@router.get("/ping")
async def health(server: Server) -> JSONResponse:
    """Return 200 while the server accepts requests, otherwise 503."""
    engine = server.engine
    status = "ok"
    if server.admission.is_closed:
        status = "shutting down"
    elif not engine.is_running:
        status = "dead"
    failed = [each["name"] for each in plugins() if each["error"]]
    error = engine.dead_with
    return JSONResponse(
        {
            "status": status,
            "error": None if error is None else type(error).__name__,
            "failed_plugins": failed,
        },
        200 if status == "ok" else 503,
    )


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of opweave."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/ops")
def list_ops(server: Server) -> dict[str, Any]:
    """List the ops with their kernels, the preferred kernel and why, and the kernels that ran."""
    return {"object": "list", "data": ops(server.engine.stats().kernels)}


@router.get("/v1/plugins")
def list_plugins() -> dict[str, Any]:
    """List the plugins with their state, registrations and errors."""
    return {"object": "list", "data": plugins()}
