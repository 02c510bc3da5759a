"""Requests to encoders: ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag

from opweave_engine import EmbeddingOutput, PoolingParams
from opweave_engine.sampling.params import check_truncation
from opweave_engine.server.errors import ApiError
from opweave_engine.server.protocol.base import (
    GeneratedBody,
    Input,
    Int,
    Items,
    RequestBody,
    RequestFields,
    ResponseBody,
    Text,
    Unused,
    either,
    harmless,
    refused,
    supported,
)
from opweave_engine.server.protocol.chat import TEXT_ONLY, Conversation, TextOnly


class EncoderFields(RequestBody):
    """Options of requests to encoders."""

    truncate_prompt_tokens: Int | None = supported("Keep this many tokens; -1: all that fit.")
    truncation_side: Literal["left", "right"] | None = supported("Side to cut off; default: right.")
    request_id: Text | None = harmless("Responses have no id; X-Request-Id is the id in the log.")
    priority: Unused = harmless("Requests are answered in their order.")
    cache_salt: Unused = harmless("Encoders do not use a prefix cache.")

    def kept_tokens(self, context: int) -> int | None:
        """Return the maximum number of tokens of a prompt for this *context*; None: no truncation.

        Raises:
            SamplingParamsError: the number is out of range.
        """
        check_truncation(self.truncate_prompt_tokens)
        return context if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class EmbeddingFields(EncoderFields, TextOnly):
    """Options of embeddings."""

    encoding_format: Literal["float", "base64"] | None = supported("float or base64.")
    dimensions: Int | None = supported("Length of the vectors, if the model was trained for it.")
    normalize: bool | None = supported("Normalize vectors to length 1; default: the checkpoint's.")
    use_activation: bool | None = supported("The same, as newer versions of vLLM call it.")
    add_special_tokens: bool | None = supported("True by default for input, false for messages.")
    padding: Unused = refused("Texts are not padded.", "do_not_pad")
    embed_dtype: Unused = refused("Numbers are float32.", "float32")
    endianness: Unused = refused("Numbers are little-endian.", "native", "little")

    def params(self) -> PoolingParams:
        """Return the parameters.

        Raises:
            SamplingParamsError: a value is out of range.
            ApiError: two fields contradict each other.
        """
        values = {self.normalize, self.use_activation} - {None}
        if len(values) > 1:
            raise ApiError(
                "normalize and use_activation differ; give one of them.", param="normalize"
            )
        return PoolingParams(self.dimensions, values.pop() if values else None)


class EmbeddingRequest(EmbeddingFields):
    """Embed texts."""

    input: Input = Field(
        description="A text or token ids, or a list of them. Send it, or messages."
    )


class EmbeddingConversation(EmbeddingFields, Conversation):
    """Embed a conversation."""

    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments, without the header of an answer."""
        return {"add_generation_prompt": False, **super().template_arguments()}


EmbeddingBody = Annotated[
    Annotated[EmbeddingRequest, Tag("EmbeddingRequest")]
    | Annotated[EmbeddingConversation, Tag("EmbeddingConversation")],
    Discriminator(either("input", "EmbeddingRequest", "messages", "EmbeddingConversation")),
]


class Embedding(ResponseBody):
    """The vector of one text: numbers, or base64 of little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseBody):
    """The number of tokens in the texts."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: Sequence[EmbeddingOutput]) -> Self:
        """Return the usage of a request with these outputs."""
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return cls(prompt_tokens=tokens, total_tokens=tokens)


class EmbeddingResponse(ResponseBody):
    """The vectors, in the order of the texts."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


# ``/v1/rerank`` and ``/v1/score``.


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
        return [d if isinstance(d, str) else d.text for d in self.documents]


class Score(ResponseBody):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(GeneratedBody):
    """The scores, in the order of the pairs."""

    object: Literal["list"] = "list"
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
