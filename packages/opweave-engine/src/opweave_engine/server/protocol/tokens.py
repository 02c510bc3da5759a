"""``/tokenize``, ``/detokenize`` and ``/v1/process``."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from opweave_engine.server.protocol.base import (
    GeneratedBody,
    Items,
    RequestBody,
    ResponseBody,
    Text,
    either,
    supported,
)
from opweave_engine.server.protocol.chat import Conversation, TextOnly
from opweave_engine.server.protocol.sampling import PRIORITY_NOTE, SALT_NOTE, CacheSalt, Priority

# ``/v1/process``.


class ProcessRequest(RequestBody):
    """A request in the format of an I/O processor."""

    data: Any = Field(description="Goes to the I/O processor.")
    priority: Priority | None = supported(PRIORITY_NOTE)
    cache_salt: CacheSalt | None = supported(SALT_NOTE)


class ProcessResponse(GeneratedBody):
    """The result of the I/O processor."""

    object: Literal["process"] = "process"
    data: Any


# ``/tokenize`` and ``/detokenize``.


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeFields(TextOnly):
    """Options of requests for tokens."""

    add_special_tokens: bool | None = supported("True by default for a prompt, false for messages.")
    return_token_strs: bool | None = supported("Also return tokens as strings of the vocabulary.")


class TokenizePrompt(TokenizeFields):
    """A text to tokenize."""

    prompt: Text = Field(description="A text. Send it, or messages.")

    @property
    def special(self) -> bool:
        """Whether the tokenizer adds special tokens: by default yes."""
        return self.add_special_tokens is not False


class TokenizeConversation(TokenizeFields, Conversation):
    """A conversation to tokenize."""

    @property
    def special(self) -> bool:
        """Whether the tokenizer adds special tokens: by default no, since templates add them."""
        return bool(self.add_special_tokens)


TokenizeRequest = Annotated[
    Annotated[TokenizePrompt, Tag("TokenizePrompt")]
    | Annotated[TokenizeConversation, Tag("TokenizeConversation")],
    Discriminator(either("prompt", "TokenizePrompt", "messages", "TokenizeConversation")),
]


class TokenizeResponse(ResponseBody):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Tokens to detokenize."""

    tokens: Items[TokenId] = Field(description="Token ids.")


class DetokenizeResponse(ResponseBody):
    """The text."""

    prompt: str
