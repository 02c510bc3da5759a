"""``POST /v1/process``: requests in the format of a plugin's I/O processor."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Request, Response

from opweave.ir.errors import OpweaveError
from opweave_engine import EmbeddingOutput, RequestOutput, SamplingParams
from opweave_engine.prompts import IOProcessor, Prompt, as_list, split_prompt
from opweave_engine.server.errors import ApiError, ServerError
from opweave_engine.server.generation import GenerationJob
from opweave_engine.server.prompts import Reading, check_context, read_prompts
from opweave_engine.server.protocol.base import Input
from opweave_engine.server.protocol.tokens import ProcessRequest, ProcessResponse
from opweave_engine.server.routes.encoders import embed
from opweave_engine.server.state import Server, ServerCall, ServerState
from opweave_engine.server.streaming import ERRORS

router = APIRouter(responses=ERRORS, tags=["Server"])


@router.post("/v1/process", response_model=ProcessResponse)
async def process(body: ProcessRequest, request: Request, server: Server) -> Response:
    """Answer a request in the format of the server's I/O processor."""
    call = server.accept(body, request, "data")
    if (processor := server.io_processor) is None:
        raise ApiError(
            "The server has no I/O processor: its model names none. Start it with "
            "--io-processor NAME, or use /v1/completions.",
            code="no_io_processor",
        )
    result = await call.unless_gone(_result(processor, body, call))
    return _response(result, processor, server)


async def _result(processor: IOProcessor, body: ProcessRequest, call: ServerCall) -> Any:
    with call.places(1):
        prompts, params = await call.as_guest(partial(_prompts, processor, body.data, call.server))
    outputs = await _outputs(processor, prompts, params, body, call)
    return await call.as_guest(partial(processor.result, body.data, outputs))


def _prompts(
    processor: IOProcessor, data: Any, server: ServerState
) -> tuple[list[Prompt], SamplingParams]:
    try:
        prompts = as_list(processor.prompts(data))
        params = processor.sampling_params(data)
        return prompts, params or SamplingParams(**server.engine.sampling_defaults)
    except (OpweaveError, ValueError) as error:
        raise ApiError(str(error), param="data") from error


async def _outputs(
    processor: IOProcessor,
    prompts: list[Prompt],
    params: SamplingParams,
    body: ProcessRequest,
    call: ServerCall,
) -> Sequence[RequestOutput] | Sequence[EmbeddingOutput]:
    contents, salts = zip(*map(split_prompt, prompts), strict=True) if prompts else ((), ())
    tokenized = await read_prompts(cast(Input, list(contents)), call, reading=Reading())
    salted = [
        replace(prompt, cache_salt=salt or body.cache_salt)
        for prompt, salt in zip(tokenized, salts, strict=True)
    ]
    if processor.embeds:
        return await embed(salted, call)
    # The processor's choice, or the checkpoint's default, which is only a limit.
    asks = params.max_tokens != call.server.engine.sampling_defaults.get("max_tokens")
    check_context(salted, params, call, limit="data", asks=asks)
    return await GenerationJob(call, "proc", salted, params, body.priority or 0).outputs()


def _response(result: Any, processor: IOProcessor, server: ServerState) -> Response:
    body = ProcessResponse(
        id=f"proc-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.model_names[0],
        data=None,
    )
    try:
        content = json.dumps({**body.model_dump(), "data": result}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ServerError(
            f"I/O processor {type(processor).__name__} returned a value that is not JSON: {error}"
        ) from error
    return Response(content, media_type="application/json")
