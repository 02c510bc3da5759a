"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from opweave.server.disconnect import unless_gone
from opweave.server.prompts import detokenize, render, tokenize
from opweave.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeConversation,
    TokenizePrompt,
    TokenizeResponse,
)
from opweave.server.routes.responses import ERRORS, json_response
from opweave.server.state import Server

router = APIRouter(responses=ERRORS, tags=["Tokens"])


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize_text(
    body: TokenizePrompt | TokenizeConversation, request: Request, server: Server
) -> Response:
    """Split a prompt, or a conversation, into tokens."""
    server.accept(body, request)
    text = body.prompt if isinstance(body, TokenizePrompt) else await render(body, server)
    reading = tokenize(text, server, special=body.special)
    ids = await unless_gone(request, reading)
    token = server.engine.tokenizer.token
    return json_response(
        TokenizeResponse(
            count=len(ids),
            max_model_len=server.engine.max_model_len,
            tokens=ids,
            token_strs=[token(i) or "" for i in ids] if body.return_token_strs else None,
        )
    )


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize_tokens(body: DetokenizeRequest, request: Request, server: Server) -> Response:
    """Join tokens to a text."""
    server.accept(body, request)
    text = await unless_gone(request, detokenize(body.tokens, server, param="tokens"))
    return json_response(DetokenizeResponse(prompt=text))
