"""Health, version, metrics, models, tokens, and requests of plugins."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from opweave import __version__
from opweave_engine.server.metrics import ops, plugins
from opweave_engine.server.prompts import Reading, detokenize, read_all, render
from opweave_engine.server.protocol.base import ModelCard, ModelList
from opweave_engine.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeConversation,
    TokenizePrompt,
    TokenizeRequest,
    TokenizeResponse,
)
from opweave_engine.server.state import Server, ServerCall, ServerState
from opweave_engine.server.streaming import ERRORS, json_response

# Health, version and metrics.


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
    failed = [plugin["name"] for plugin in plugins() if plugin["error"]]
    error = None if engine.dead_with is None else type(engine.dead_with).__name__
    body = {"status": status, "error": error, "failed_plugins": failed}
    return JSONResponse(body, 200 if status == "ok" else 503)


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


# ``GET /v1/models``.


models_router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@models_router.get("/v1/models")
async def models(server: Server) -> ModelList:
    """List the served model names."""
    return ModelList(data=[_card(name, server) for name in server.model_names])


@models_router.get("/v1/models/{model:path}")
async def model(model: str, server: Server) -> ModelCard:
    """Return one model."""
    server.check_model(model)
    return _card(model, server)


def _card(name: str, server: ServerState) -> ModelCard:
    root, max_model_len = server.engine.model_name, server.engine.max_model_len
    return ModelCard(id=name, created=server.created, root=root, max_model_len=max_model_len)


# ``POST /tokenize`` and ``POST /detokenize``.


tokens_router = APIRouter(responses=ERRORS, tags=["Tokens"])


@tokens_router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize_text(body: TokenizeRequest, request: Request, server: Server) -> Response:
    """Tokenize a prompt or a conversation."""
    is_text = isinstance(body, TokenizePrompt)
    call = server.accept(body, request, "prompt" if is_text else "messages")
    ids, strings = await call.unless_gone(_tokens(body, call))
    # The lists may have a million entries, whose validation would delay other requests.
    context = server.engine.max_model_len
    response = TokenizeResponse.model_construct(
        count=len(ids), max_model_len=context, tokens=ids, token_strs=strings
    )
    return json_response(response)


async def _tokens(
    body: TokenizePrompt | TokenizeConversation, call: ServerCall
) -> tuple[list[int], list[str] | None]:
    """Return the tokens, and how the vocabulary writes them if the request asks for that."""
    tokenizer, reading = call.server.engine.tokenizer, Reading(body.special)

    def encode(text: str) -> tuple[list[int], list[str] | None]:
        ids = reading.prompt(text, tokenizer).ids
        return ids, [tokenizer.token(i) or "" for i in ids] if body.return_token_strs else None

    text = body.prompt if isinstance(body, TokenizePrompt) else await render(body, call)
    (tokens,) = await read_all(encode, [text], call)
    return tokens


@tokens_router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize_tokens(body: DetokenizeRequest, request: Request, server: Server) -> Response:
    """Detokenize token ids."""
    call = server.accept(body, request, "tokens")
    text = await call.unless_gone(detokenize(body.tokens, call))
    return json_response(DetokenizeResponse(prompt=text))
