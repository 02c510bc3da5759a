"""``POST /v1/rerank`` and ``POST /v1/score``, with and without the version in the path."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from opweave_engine import EmbeddingOutput, PromptError
from opweave_engine.prompts import as_pairs
from opweave_engine.server.errors import ApiError
from opweave_engine.server.prompts import Reading, read_pairs
from opweave_engine.server.protocol.embeddings import EmbeddingUsage, EncoderFields
from opweave_engine.server.protocol.scoring import (
    RankedText,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from opweave_engine.server.routes.embeddings import check_finite, embed, embeddings_at_once
from opweave_engine.server.state import Server, ServerCall
from opweave_engine.server.streaming import ERRORS, json_response

router = APIRouter(responses=ERRORS, tags=["Scoring"])


@router.post("/rerank", response_model=RerankResponse)
@router.post("/v1/rerank", response_model=RerankResponse)
async def rerank(body: RerankRequest, request: Request, server: Server) -> Response:
    """Sort documents by their score for a query, with a cross-encoder."""
    call = server.accept(body, request, "documents")
    texts = body.texts()
    outputs = await _outputs(body, [(body.query, text) for text in texts], call)
    results = [
        RerankResult(
            index=index,
            document=None if body.return_documents is False else RankedText(text=texts[index]),
            relevance_score=output.embedding[0],
        )
        for index, output in enumerate(outputs)
    ]
    results.sort(key=lambda result: -result.relevance_score)
    response = RerankResponse(
        id=f"rerank-{uuid.uuid4().hex}",
        model=server.model_names[0],
        results=results[: body.top_n or None],
        usage=EmbeddingUsage.of(outputs),
    )
    return json_response(response, exclude_none=True)


@router.post("/score", response_model=ScoreResponse)
@router.post("/v1/score", response_model=ScoreResponse)
async def score(body: ScoreRequest, request: Request, server: Server) -> Response:
    """Score pairs of texts, with a cross-encoder."""
    call = server.accept(body, request, "text_2")
    try:
        pairs = as_pairs(body.text_1, body.text_2)
    except PromptError as error:
        raise ApiError(str(error), param="text_2") from error
    outputs = await _outputs(body, pairs, call)
    data = [Score(index=index, score=out.embedding[0]) for index, out in enumerate(outputs)]
    response = ScoreResponse(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.model_names[0],
        data=data,
        usage=EmbeddingUsage.of(outputs),
    )
    return json_response(response)


async def _outputs(
    body: EncoderFields, pairs: list[tuple[str, str]], call: ServerCall
) -> list[EmbeddingOutput]:
    """Return the output of each pair; its vector is the score."""
    keep = body.kept_tokens(call.server.engine.max_model_len)
    reading = Reading(True, keep, body.truncation_side or "right")
    at_once = embeddings_at_once(len(pairs), call.server)
    prompts, params = await call.unless_gone(
        read_pairs(pairs, call, reading=reading, at_once=at_once)
    )
    outputs = await call.unless_gone(embed(prompts, call, params))
    check_finite(outputs, code="non_finite_score")
    return outputs
