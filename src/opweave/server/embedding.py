"""Embeddings of the prompts of one request."""

from __future__ import annotations

import asyncio
import uuid

from opweave.engine import EmbeddingOutput, PoolingParams, PromptError
from opweave.server.deadline import Deadline
from opweave.server.errors import ApiError
from opweave.server.merge_streams import cancelled
from opweave.server.prompts import Prompt
from opweave.server.state import ServerState


async def embed(
    prompts: list[Prompt],
    server: ServerState,
    deadline: Deadline,
    *,
    param: str,
    params: PoolingParams | None = None,
) -> list[EmbeddingOutput]:
    """Return the vector of each prompt, in order; cancelling aborts the request.

    *param* is the request field of the prompts.

    Raises:
        ApiError: too many requests are running, the deadline passes, or the server stops.
        EngineError: the engine fails.
    """
    name = f"embd-{uuid.uuid4().hex}"
    with server.admission.places(len(prompts), param=param):
        tasks = [
            asyncio.create_task(
                server.engine.embed(prompt.ids, params, request_id=f"{name}-{index}")
            )
            for index, prompt in enumerate(prompts)
        ]
        try:
            async with deadline.limit():
                return await asyncio.gather(*tasks)
        except PromptError as error:
            raise ApiError(str(error), param=param) from error
        finally:
            await cancelled(tasks)
