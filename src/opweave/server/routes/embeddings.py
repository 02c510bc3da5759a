"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
import struct

from fastapi import APIRouter, Request, Response

from opweave.engine import EmbeddingOutput
from opweave.server.disconnect import unless_gone
from opweave.server.embedding import embed
from opweave.server.errors import ApiError
from opweave.server.prompts import read_prompts
from opweave.server.protocol.embeddings import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
)
from opweave.server.routes.responses import ERRORS, json_response
from opweave.server.state import Server

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def embeddings(body: EmbeddingRequest, request: Request, server: Server) -> Response:
    """Turn texts into vectors."""
    server.accept(body, request)
    deadline = server.deadline()
    prompts = await read_prompts(body.input, server, param="input")
    outputs = await unless_gone(request, embed(prompts, server, deadline, param="input"))
    _check_dimensions(body.dimensions, outputs)
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
