"""``/v1/embeddings``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from opweave_engine import EmbeddingOutput, PoolingParams
from opweave_engine.sampling.params import check_truncation
from opweave_engine.server.errors import ApiError
from opweave_engine.server.protocol.base import (
    Input,
    Int,
    RequestBody,
    ResponseBody,
    Text,
    Unused,
    either,
    harmless,
    refused,
    supported,
)
from opweave_engine.server.protocol.chat import Conversation, TextOnly


class EncoderFields(RequestBody):
    """Options of requests to encoders."""

    truncate_prompt_tokens: Int | None = supported(
        "Keep this many tokens of a longer text; -1 keeps as many as the model accepts."
    )
    truncation_side: Literal["left", "right"] | None = supported(
        "The side that is cut off: right by default, or left."
    )
    request_id: Text | None = harmless(
        "Responses have no id; send the header X-Request-Id for the log."
    )
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
    dimensions: Int | None = supported(
        "The length of the vectors, if the model was trained for it."
    )
    normalize: bool | None = supported(
        "Normalize vectors to length 1; by default as in the checkpoint."
    )
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
        given = {self.normalize, self.use_activation} - {None}
        if len(given) > 1:
            raise ApiError(
                "normalize and use_activation differ; give one of them.", param="normalize"
            )
        return PoolingParams(self.dimensions, given.pop() if given else None)


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
    def of(cls, outputs: Sequence[EmbeddingOutput]) -> EmbeddingUsage:
        """Return the usage of a request with these outputs."""
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return cls(prompt_tokens=tokens, total_tokens=tokens)


class EmbeddingResponse(ResponseBody):
    """The vectors, in the order of the texts."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
