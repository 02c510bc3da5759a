"""``/tokenize``, ``/detokenize`` and ``/v1/process``."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from opweave_engine.server.protocol import base
from opweave_engine.server.protocol.chat import Conversation, TextOnly
from opweave_engine.server.protocol.sampling import PRIORITY_NOTE, SALT_NOTE, CacheSalt, Priority

# ``/v1/process``.


class ProcessRequest(base.RequestBody):
    """A request in the format of an I/O processor."""

    data: Any = Field(description="Goes to the I/O processor.")
    priority: Priority | None = base.supported(PRIORITY_NOTE)
    cache_salt: CacheSalt | None = base.supported(SALT_NOTE)


class ProcessResponse(base.GeneratedBody):
    """The result of the I/O processor."""

    object: Literal["process"] = "process"
    data: Any


# ``/tokenize`` and ``/detokenize``.


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeFields(TextOnly):
    """Options of requests for tokens."""

    add_special_tokens: bool | None = base.supported(
        "True by default for a prompt, false for messages."
    )
    return_token_strs: bool | None = base.supported(
        "Also return tokens as strings of the vocabulary."
    )


class TokenizePrompt(TokenizeFields):
    """A text to tokenize."""

    prompt: base.Text = Field(description="A text. Send it, or messages.")

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
    Discriminator(base.either("prompt", "TokenizePrompt", "messages", "TokenizeConversation")),
]


class TokenizeResponse(base.ResponseBody):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(base.RequestBody):
    """Tokens to detokenize."""

    tokens: base.Items[TokenId] = Field(description="Token ids.")


class DetokenizeResponse(base.ResponseBody):
    """The text."""

    prompt: str
