"""Requests to encoders: ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

import asyncio
import base64
import math
import struct
import time
import uuid
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from opweave_engine import EmbeddingOutput, PoolingParams, PromptError
from opweave_engine.prompts import as_pairs
from opweave_engine.server.disconnect import cancelled
from opweave_engine.server.errors import ApiError
from opweave_engine.server.prompts import Prompt, Reading, read_pairs, read_prompts, render
from opweave_engine.server.protocol import encoders as protocol
from opweave_engine.server.state import Server, ServerCall, ServerState
from opweave_engine.server.streaming import ERRORS, json_response

# Embeddings of the prompts of one request.


_MAX_RUNNING_PROMPTS = 256  # prompts of one request; others wait for them


def embeddings_at_once(count: int, server: ServerState) -> int:
    """Return how many of *count* prompts of one request the engine gets at one time."""
    return min(count, _MAX_RUNNING_PROMPTS, server.config.max_requests)


async def embed(
    prompts: list[Prompt], call: ServerCall, params: Sequence[PoolingParams] = ()
) -> list[EmbeddingOutput]:
    """Return the vector of each prompt, in order; cancelling aborts the request.

    Args:
        prompts: the prompts of the request.
        call: the request.
        params: the pooling parameters of each prompt; empty: the checkpoint's.

    Raises:
        ApiError: too many requests are running, the deadline passes, or the server stops.
        EngineError: the engine fails.
    """
    name = f"embd-{uuid.uuid4().hex}"
    outputs: dict[int, EmbeddingOutput] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for index, prompt in waiting:
            outputs[index] = await call.server.engine.embed(
                prompt.ids, params[index] if params else None, request_id=f"{name}-{index}"
            )

    count = embeddings_at_once(len(prompts), call.server)
    with call.places(count):
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        try:
            async with call.deadline.limit():
                await asyncio.gather(*tasks)
            return [outputs[index] for index in range(len(prompts))]
        except PromptError as error:
            raise ApiError(str(error), param=call.param) from error
        finally:
            await cancelled(tasks)


def check_finite(outputs: Sequence[EmbeddingOutput], *, code: str) -> None:
    """Raise the ApiError *code* if a number of *outputs* is not finite."""
    broken = [i for i, out in enumerate(outputs) if not all(map(math.isfinite, out.embedding))]
    if broken:
        raise ApiError(
            f"The model returned numbers that are NaN or infinite for input {broken[0]}. Start the "
            "server with --dtype float32; if that does not help, a weight or a kernel is wrong.",
            status=500,
            code=code,
        )


# ``POST /v1/embeddings``.


_MAX_INPUTS = 2048  # as in OpenAI's API

router = APIRouter(responses=ERRORS, tags=["OpenAI"])


@router.post("/v1/embeddings", response_model=protocol.EmbeddingResponse)
async def embeddings(body: protocol.EmbeddingBody, request: Request, server: Server) -> Response:
    """Embed texts or a conversation."""
    is_text = isinstance(body, protocol.EmbeddingRequest)
    call = server.accept(body, request, "input" if is_text else "messages")
    params, special = body.params(), body.add_special_tokens
    reading = Reading(
        is_text if special is None else special,
        body.kept_tokens(server.engine.max_model_len),
        body.truncation_side or "right",
    )
    if isinstance(body, protocol.EmbeddingRequest):
        texts = body.input
        if isinstance(texts, list) and len(texts) > _MAX_INPUTS and not isinstance(texts[0], int):
            raise ApiError(
                f"input has {len(texts)} entries, but a request may have at most {_MAX_INPUTS}. "
                "Send several requests.",
                param="input",
                code="too_many_inputs",
            )
    else:
        texts = await call.unless_gone(render(body, call))
    at_once = embeddings_at_once(_MAX_INPUTS, server)
    prompts = await call.unless_gone(read_prompts(texts, call, at_once=at_once, reading=reading))
    outputs = await call.unless_gone(embed(prompts, call, [params] * len(prompts)))
    size = len(outputs[0].embedding)
    if body.dimensions not in (None, size):
        raise ApiError(
            f"dimensions={body.dimensions} is not possible: the model's vectors have {size} "
            "numbers.",
            param="dimensions",
        )
    check_finite(outputs, code="non_finite_embedding")
    data = [
        protocol.Embedding(index=index, embedding=_encoded(output.embedding, body.encoding_format))
        for index, output in enumerate(outputs)
    ]
    usage = protocol.EmbeddingUsage.of(outputs)
    return json_response(
        protocol.EmbeddingResponse(model=server.model_names[0], data=data, usage=usage)
    )


def _encoded(vector: list[float], encoding: str | None) -> list[float] | str:
    if encoding != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


# ``POST /v1/rerank`` and ``POST /v1/score``, with and without the version in the path.


scoring_router = APIRouter(responses=ERRORS, tags=["Scoring"])


@scoring_router.post("/rerank", response_model=protocol.RerankResponse)
@scoring_router.post("/v1/rerank", response_model=protocol.RerankResponse)
async def rerank(body: protocol.RerankRequest, request: Request, server: Server) -> Response:
    """Sort documents by their score for a query, with a cross-encoder."""
    call = server.accept(body, request, "documents")
    texts = body.texts()
    outputs = await _outputs(body, [(body.query, text) for text in texts], call)
    results = [
        protocol.RerankResult(
            index=index,
            document=None if body.return_documents is False else protocol.RankedText(text=text),
            relevance_score=output.embedding[0],
        )
        for index, (text, output) in enumerate(zip(texts, outputs, strict=True))
    ]
    results.sort(key=lambda result: -result.relevance_score)
    response = protocol.RerankResponse(
        id=f"rerank-{uuid.uuid4().hex}",
        model=server.model_names[0],
        results=results[: body.top_n or None],
        usage=protocol.EmbeddingUsage.of(outputs),
    )
    return json_response(response, exclude_none=True)


@scoring_router.post("/score", response_model=protocol.ScoreResponse)
@scoring_router.post("/v1/score", response_model=protocol.ScoreResponse)
async def score(body: protocol.ScoreRequest, request: Request, server: Server) -> Response:
    """Score pairs of texts, with a cross-encoder."""
    call = server.accept(body, request, "text_2")
    try:
        pairs = as_pairs(body.text_1, body.text_2)
    except PromptError as error:
        raise ApiError(str(error), param="text_2") from error
    outputs = await _outputs(body, pairs, call)
    data = [
        protocol.Score(index=index, score=out.embedding[0]) for index, out in enumerate(outputs)
    ]
    response = protocol.ScoreResponse(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.model_names[0],
        data=data,
        usage=protocol.EmbeddingUsage.of(outputs),
    )
    return json_response(response)


async def _outputs(
    body: protocol.EncoderFields, pairs: list[tuple[str, str]], call: ServerCall
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
