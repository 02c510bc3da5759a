"""``/v1/rerank`` and ``/v1/score``."""

from __future__ import annotations

from typing import Literal

from opweave_engine.server.errors import ApiError
from opweave_engine.server.protocol.base import Int, Items, RequestFields, ResponseBody, Text
from opweave_engine.server.protocol.embeddings import EmbeddingUsage, EncoderFields


class ScoreRequest(EncoderFields):
    """Score pairs of texts."""

    endpoint = "score"

    text_1: Text | Items[Text]
    text_2: Text | Items[Text]


class Document(RequestFields):
    """A document as an object."""

    text: Text


class RerankRequest(EncoderFields):
    """Sort documents by their score for a query."""

    endpoint = "rerank"

    query: Text
    documents: Items[Text | Document]
    top_n: Int | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Return the texts of the documents.

        Raises:
            ApiError: there are no documents.
        """
        if not self.documents:
            raise ApiError("documents is empty; it must hold at least one.", param="documents")
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def num_results(self) -> int:
        """Return the maximum number of results.

        Raises:
            ApiError: ``top_n`` is out of range.
        """
        if self.top_n is not None and self.top_n < 0:
            raise ApiError(
                f"top_n={self.top_n} must be at least 1, or 0 for all documents.", param="top_n"
            )
        return self.top_n or len(self.documents)


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
