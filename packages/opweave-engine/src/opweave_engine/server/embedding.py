"""Embeddings of the prompts of one request."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence

from opweave_engine import EmbeddingOutput, PoolingParams, PromptError
from opweave_engine.server.deadline import Deadline
from opweave_engine.server.errors import ApiError
from opweave_engine.server.merge_streams import cancelled
from opweave_engine.server.prompts import Prompt
from opweave_engine.server.state import ServerState

_MAX_AT_ONCE = 256  # prompts of one request; others wait for them


def embeddings_at_once(count: int, server: ServerState) -> int:
    """Return how many of *count* prompts of one request the engine gets at one time."""
    return min(count, _MAX_AT_ONCE, server.config.max_requests)


async def embed(
    prompts: list[Prompt],
    server: ServerState,
    deadline: Deadline,
    *,
    param: str,
    params: Sequence[PoolingParams] = (),
) -> list[EmbeddingOutput]:
    """Return the vector of each prompt, in order; cancelling aborts the request.

    Args:
        prompts: the prompts of the request.
        server: the server with the engine.
        deadline: of the request.
        param: the request field of the prompts.
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
            outputs[index] = await server.engine.embed(
                prompt.ids, params[index] if params else None, request_id=f"{name}-{index}"
            )

    count = embeddings_at_once(len(prompts), server)
    with server.admission.places(count, param=param):
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        try:
            async with deadline.limit():
                await asyncio.gather(*tasks)
            return [outputs[index] for index in range(len(prompts))]
        except PromptError as error:
            raise ApiError(str(error), param=param) from error
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
