"""``/tokenize``, ``/detokenize`` and ``/v1/process``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from opweave_engine.server.protocol.base import Items, RequestBody, ResponseBody, Text, either
from opweave_engine.server.protocol.chat import Conversation
from opweave_engine.server.protocol.sampling import CacheSalt, Priority

# ``/v1/process``.


class ProcessRequest(RequestBody):
    """A request in the format of an I/O processor."""

    endpoint = "process"

    data: Any
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class ProcessResponse(ResponseBody):
    """The result of the I/O processor."""

    id: str
    object: Literal["process"] = "process"
    created: int
    model: str
    data: Any


# ``/tokenize`` and ``/detokenize``.


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizePrompt(RequestBody):
    """A text to tokenize."""

    endpoint = "tokenize"

    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def special(self) -> bool:
        """Whether the tokenizer adds special tokens: by default yes."""
        return self.add_special_tokens is not False


class TokenizeConversation(Conversation):
    """A conversation to tokenize."""

    endpoint = "tokenize"

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

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

    endpoint = "detokenize"

    tokens: Items[TokenId]


class DetokenizeResponse(ResponseBody):
    """The text."""

    prompt: str
