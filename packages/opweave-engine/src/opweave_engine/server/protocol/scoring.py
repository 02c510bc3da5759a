"""``/v1/rerank`` and ``/v1/score``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opweave_engine.server.protocol.base import (
    Int,
    Items,
    RequestFields,
    ResponseBody,
    Text,
    Unused,
    refused,
    supported,
)
from opweave_engine.server.protocol.chat import TEXT_ONLY
from opweave_engine.server.protocol.embeddings import EmbeddingUsage, EncoderFields

_ALWAYS_ACTIVATED = "Scores go through the checkpoint's activation function."
_SEND_TEXTS = "Send text_1 and text_2."


class ScoringFields(EncoderFields):
    """Options of requests to cross-encoders."""

    use_activation: Unused = refused(_ALWAYS_ACTIVATED, True)
    activation: Unused = refused(_ALWAYS_ACTIVATED, True)
    mm_processor_kwargs: Unused = refused(TEXT_ONLY, {})


class ScoreRequest(ScoringFields):
    """Score pairs of texts."""

    text_1: Text | Items[Text] = Field(
        description="The first text of every pair, or a list with one for each pair."
    )
    text_2: Text | Items[Text] = Field(description="The second text, or a list of them.")
    data_1: Unused = refused(_SEND_TEXTS)
    data_2: Unused = refused(_SEND_TEXTS)
    queries: Unused = refused(_SEND_TEXTS)
    items: Unused = refused(_SEND_TEXTS)
    documents: Unused = refused(_SEND_TEXTS)


class Document(RequestFields):
    """A document as an object."""

    text: Text = Field(description="The text of a document.")


class RerankRequest(ScoringFields):
    """Sort documents by their score for a query."""

    query: Text = Field(description="The first text of every pair.")
    documents: Items[Text | Document] = Field(
        min_length=1, description="The second texts: strings or objects."
    )
    top_n: Int | None = supported("The maximum number of results; 0: all.", ge=0)
    return_documents: bool | None = supported("True by default; false leaves the texts out.")
    rank_fields: Unused = refused("Documents have one field, text.", [], ["text"])
    max_chunks_per_doc: Unused = refused("Documents are not split; use truncate_prompt_tokens.")
    max_tokens_per_doc: Unused = refused("Use truncate_prompt_tokens.")

    def texts(self) -> list[str]:
        """Return the texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Score(ResponseBody):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(ResponseBody):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(ResponseBody):
    """A document of the request."""

    text: str


class RerankResult(ResponseBody):
    """The score of one document; *index* is its place in the request."""

    index: int
    document: RankedText | None = None
    relevance_score: float


class RerankResponse(ResponseBody):
    """The documents with the highest scores, in descending order."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
