"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from opweave.server.disconnect import unless_gone
from opweave.server.prompts import Reading, detokenize, render, tokenize
from opweave.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeConversation,
    TokenizePrompt,
    TokenizeRequest,
    TokenizeResponse,
)
from opweave.server.routes.responses import ERRORS, json_response
from opweave.server.state import Server, ServerState

router = APIRouter(responses=ERRORS, tags=["Tokens"])


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize_text(body: TokenizeRequest, request: Request, server: Server) -> Response:
    """Tokenize a prompt or a conversation."""
    server.accept(body, request)
    ids = await unless_gone(request, _tokens(body, request, server))
    token = server.engine.tokenizer.token
    return json_response(
        TokenizeResponse(
            count=len(ids),
            max_model_len=server.engine.max_model_len,
            tokens=ids,
            token_strs=[token(i) or "" for i in ids] if body.return_token_strs else None,
        )
    )


async def _tokens(
    body: TokenizePrompt | TokenizeConversation, request: Request, server: ServerState
) -> list[int]:
    if isinstance(body, TokenizePrompt):
        text = body.prompt
    else:
        text = await render(body, request, server, server.deadline())
    return await tokenize(text, server, Reading(add_special_tokens=body.special))


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize_tokens(body: DetokenizeRequest, request: Request, server: Server) -> Response:
    """Detokenize token ids."""
    server.accept(body, request)
    text = await unless_gone(request, detokenize(body.tokens, server, param="tokens"))
    return json_response(DetokenizeResponse(prompt=text))
