"""What a server knows of an engine: nothing but this."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from opweave.engine.embedding.pooling_params import PoolingParams
from opweave.engine.metrics.stats import EngineStats
from opweave.engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave.engine.sampling.sampling_params import SamplingParams
from opweave.engine.tokenization.tokenizer import Tokenizer


class EngineClient(Protocol):
    """An engine that answers many requests at once, wherever it runs.

    All methods are called from one asyncio event loop. A request is known by *request_id*, which no
    other that is unfinished may have.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the checkpoint sets for requests that do not, by name."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model are below it; the tokenizer may have fewer."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""

    @property
    def model_name(self) -> str:
        """The name of the model: its directory's, unless it was given another."""

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests: it is started, not shut down, and not dead."""

    @property
    def dead_with(self) -> BaseException | None:
        """What the engine died of, or None."""

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answer as it grows: each output holds everything so far.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Args:
            prompt: a text, or token ids.
            params: how to choose tokens.
            request_id: its name.
            priority: a lower number goes first.

        Raises:
            PromptError: the prompt is empty, too long, or not made of the model's tokens.
            InvalidArgumentError: *request_id* is in use, or another event loop asks.
            NonFiniteLogitsError: the model's scores are not numbers; other requests go on.
            EngineDeadError: the engine does not run, or dies before the answer is complete.
        """

    async def embed(
        self,
        prompt: str | Sequence[int],
        params: PoolingParams | None = None,
        *,
        request_id: str,
    ) -> EmbeddingOutput:
        """Return the vector of a prompt.

        Raises:
            SamplingParamsError: *params* ask for a length that vectors cannot have.
            PromptError: as for :meth:`generate`.
            InvalidArgumentError: the model makes no embeddings, or another event loop asks.
            EngineDeadError: the engine does not run.
        """

    async def abort(self, request_id: str) -> None:
        """Give up a request: its last output has the finish reason ``"abort"``.

        One that is unknown, or finished already, is left alone.
        """

    def stats(self) -> EngineStats:
        """Return what the engine does and has done."""

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and wait until those there are have finished.

        After *timeout* seconds, the rest is aborted.
        """

    def shutdown(self) -> None:
        """Stop the engine, and free what it holds; what is unfinished is aborted."""
