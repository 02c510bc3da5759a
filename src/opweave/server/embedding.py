"""Vectors of the prompts of one request."""

from __future__ import annotations

import asyncio
import uuid

from opweave.engine import EmbeddingOutput
from opweave.server.errors import too_late
from opweave.server.merge import cancelled
from opweave.server.prompts import Prompt
from opweave.server.state import ServerState


async def embed(prompts: list[Prompt], server: ServerState) -> list[EmbeddingOutput]:
    """Return the vector of each prompt, in their order; being cancelled aborts.

    Raises:
        ApiError: too many requests are running, it takes too long, or the server stops.
        EngineError: what the engine raises.
    """
    name = f"embd-{uuid.uuid4().hex}"
    with server.admission.places(len(prompts)):
        tasks = [
            asyncio.create_task(server.engine.embed(prompt.ids, request_id=f"{name}-{index}"))
            for index, prompt in enumerate(prompts)
        ]
        try:
            async with asyncio.timeout(server.config.request_timeout):
                return await asyncio.gather(*tasks)
        except TimeoutError as error:
            raise too_late(server.config.request_timeout) from error
        finally:
            await cancelled(tasks)
