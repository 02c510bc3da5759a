"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
import struct

from fastapi import APIRouter, Request, Response

from opweave_engine import EmbeddingOutput
from opweave_engine.server.disconnect import unless_gone
from opweave_engine.server.embedding import check_finite, embed, embeddings_at_once
from opweave_engine.server.errors import ApiError
from opweave_engine.server.prompts import Reading, read_prompts, render
from opweave_engine.server.protocol.embeddings import (
    Embedding,
    EmbeddingBody,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
)
from opweave_engine.server.routes.responses import ERRORS, json_response
from opweave_engine.server.state import Server

_MAX_INPUTS = 2048  # as in OpenAI's API

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def embeddings(body: EmbeddingBody, request: Request, server: Server) -> Response:
    """Embed texts or a conversation."""
    server.accept(body, request)
    params, deadline = body.params(), server.deadline()
    keep, side = body.kept_tokens(server.engine.max_model_len), body.truncation_side or "right"
    if isinstance(body, EmbeddingRequest):
        param = "input"
        reading = Reading(body.add_special_tokens is not False, keep, side)
        if (
            isinstance(body.input, list)
            and len(body.input) > _MAX_INPUTS
            and not isinstance(body.input[0], int)
        ):
            raise ApiError(
                f"input has {len(body.input)} entries, but a request may have at most "
                f"{_MAX_INPUTS}. Send several requests.",
                param=param,
                code="too_many_inputs",
            )
        at_once = embeddings_at_once(_MAX_INPUTS, server)
        reads = read_prompts(
            body.input, server, deadline, param=param, at_once=at_once, reading=reading
        )
    else:
        param = "messages"
        reading = Reading(bool(body.add_special_tokens), keep, side)
        text = await unless_gone(request, render(body, request, server, deadline))
        reads = read_prompts(text, server, deadline, param=param, reading=reading)
    prompts = await unless_gone(request, reads)
    work = embed(prompts, server, deadline, param=param, params=[params] * len(prompts))
    outputs = await unless_gone(request, work)
    _check_dimensions(body.dimensions, outputs)
    check_finite(outputs, code="non_finite_embedding")
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    data = [
        Embedding(index=index, embedding=_encoded(output.embedding, body.encoding_format))
        for index, output in enumerate(outputs)
    ]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return json_response(EmbeddingResponse(model=server.model_names[0], data=data, usage=usage))


def _check_dimensions(wanted: int | None, outputs: list[EmbeddingOutput]) -> None:
    size = len(outputs[0].embedding)
    if wanted not in (None, size):
        raise ApiError(
            f"dimensions={wanted} is not possible: the model's vectors have {size} numbers.",
            param="dimensions",
        )


def _encoded(vector: list[float], form: str | None) -> list[float] | str:
    if form != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
