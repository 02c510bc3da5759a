"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from opweave_engine.server.deadline import Deadline
from opweave_engine.server.disconnect import unless_gone
from opweave_engine.server.prompts import Reading, detokenize, read_all, render
from opweave_engine.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeConversation,
    TokenizePrompt,
    TokenizeRequest,
    TokenizeResponse,
)
from opweave_engine.server.routes.responses import ERRORS, json_response
from opweave_engine.server.state import Server, ServerState

router = APIRouter(responses=ERRORS, tags=["Tokens"])


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize_text(body: TokenizeRequest, request: Request, server: Server) -> Response:
    """Tokenize a prompt or a conversation."""
    server.accept(body, request)
    ids, strings = await unless_gone(request, _tokens(body, request, server, server.deadline()))
    # The lists may have a million entries, whose validation would delay other requests.
    response = TokenizeResponse.model_construct(
        count=len(ids),
        max_model_len=server.engine.max_model_len,
        tokens=ids,
        token_strs=strings,
    )
    return json_response(response)


async def _tokens(
    body: TokenizePrompt | TokenizeConversation,
    request: Request,
    server: ServerState,
    deadline: Deadline,
) -> tuple[list[int], list[str] | None]:
    """Return the tokens, and how the vocabulary writes them if the request asks for that."""
    tokenizer, reading = server.engine.tokenizer, Reading(add_special_tokens=body.special)

    def encode(text: str) -> tuple[list[int], list[str] | None]:
        ids = reading.tokens(text, tokenizer)
        return ids, [tokenizer.token(i) or "" for i in ids] if body.return_token_strs else None

    if isinstance(body, TokenizePrompt):
        param, text = "prompt", body.prompt
    else:
        param, text = "messages", await render(body, request, server, deadline)
    (tokens,) = await read_all(encode, [text], server, deadline, param=param)
    return tokens


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize_tokens(body: DetokenizeRequest, request: Request, server: Server) -> Response:
    """Detokenize token ids."""
    server.accept(body, request)
    work = detokenize(body.tokens, server, server.deadline(), param="tokens")
    text = await unless_gone(request, work)
    return json_response(DetokenizeResponse(prompt=text))
