"""The interface between a server and an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.metrics.stats import EngineStats
from opweave_engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.request.prompts import Prompt
from opweave_engine.sampling.sampling_params import SamplingParams
from opweave_engine.tokenization.tokenizer import Tokenizer


class EngineClient(Protocol):
    """An engine for asyncio that runs many requests at once, in this process or in others.

    All methods are called from one event loop. The *request_id* identifies a request; no other
    unfinished request may have the same.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Default sampling parameters from the checkpoint, by name."""

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary; the tokenizer's may be smaller."""

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of a prompt and its output."""

    @property
    def model_name(self) -> str:
        """The name of the model; by default, the name of its directory."""

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests: it has started, and has not shut down or died."""

    @property
    def dead_with(self) -> BaseException | None:
        """The error that the engine died of, or None."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output after each step, with everything generated so far.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Args:
            prompt: a text, token ids, or a dict with one of them and a ``cache_salt``.
            params: the sampling parameters.
            request_id: a name for the request.
            priority: the scheduling priority; lower numbers go first.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids outside the vocabulary.
            InvalidArgumentError: *request_id* is in use, or another event loop uses the engine.
            NonFiniteLogitsError: the model's logits are not finite; other requests go on.
            EngineDeadError: the engine does not run, or dies before the request finishes.
        """

    def generate_deltas(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output of :meth:`generate` as deltas, with only new text and tokens.

        The first delta contains the prompt and all outputs. Later ones contain the outputs that
        changed, with an empty ``prompt_token_ids``. Each finish reason is reported once. A slow
        reader gets several deltas merged into one.
        """

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        request_id: str,
    ) -> EmbeddingOutput:
        """Return the embedding of a prompt, or the score of a pair of texts.

        Pairs have ``token_type_ids`` in *params*; the vector's only number is their score.

        Raises:
            SamplingParamsError: *params* ask for dimensions that the model does not support.
            PromptError: as for :meth:`generate`.
            InvalidArgumentError: the model is not an encoder, or for a pair not a cross-encoder; or
                another event loop uses the engine.
            EngineDeadError: the engine does not run.
        """

    async def abort(self, request_id: str) -> None:
        """Abort a request: its last output has the finish reason ``"abort"``.

        No-op if the request is unknown or has finished.
        """

    def stats(self) -> EngineStats:
        """Return the statistics since the engine started."""

    async def drain(self, timeout: float) -> None:
        """Reject new requests, and wait until all unfinished ones have finished.

        After *timeout* seconds, abort the rest.
        """

    def shutdown(self) -> None:
        """Abort all unfinished requests, stop the engine, and free its memory."""
