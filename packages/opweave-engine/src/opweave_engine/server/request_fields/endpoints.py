"""The fields of every endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from opweave_engine.server.request_fields.check import FieldTable
from opweave_engine.server.request_fields.conversation import ABILITIES, CONVERSATION, STORAGE
from opweave_engine.server.request_fields.generation import (
    CACHE_SALT,
    COMMON,
    REQUEST,
    SAMPLING,
    STRUCTURED,
)
from opweave_engine.server.request_fields.responses import RESPONSES
from opweave_engine.server.request_fields.row import Row, harmless, refused, supported


@dataclass(frozen=True)
class Endpoint:
    """An endpoint and the fields of its requests.

    Attributes:
        path: the path of the endpoint.
        rows: one for each field.
        is_served: whether the server has the endpoint; otherwise requests get a 404.
    """

    path: str
    rows: Sequence[Row]
    is_served: bool = True

    @cached_property
    def table(self) -> FieldTable:
        """The rows, for checks."""
        return FieldTable(self.rows)


_COMPLETIONS = (
    *COMMON,
    supported("prompt", "A text or token ids, or a list of them."),
    refused("prompt_embeds", "Send a text or token ids.", off=([],)),
    supported("echo", "Begin the answer with the prompt."),
    supported("logprobs", "Log-probabilities of the tokens, and of this many alternatives."),
    refused("suffix", "Models continue prompts only.", off=("",)),
    supported("best_of", "Only with the value of n."),
    *SAMPLING,
    *REQUEST,
    *STRUCTURED,
)
_CHAT = (
    *COMMON,
    *CONVERSATION,
    supported("max_completion_tokens", "As max_tokens, which it overrides."),
    supported("logprobs", "Whether to return log-probabilities."),
    supported("top_logprobs", "Log-probabilities of this many alternatives; with logprobs."),
    refused("best_of", "Use n.", off=(1,)),
    refused("echo", "The prompt is not repeated.", off=(False,)),
    harmless("prediction", "It would only save time."),
    *SAMPLING,
    *REQUEST,
    *STRUCTURED,
    *ABILITIES,
    *STORAGE,
)
_ENCODER = (
    supported(
        "truncate_prompt_tokens",
        "Keep this many tokens of a longer text; -1 keeps as many as the model accepts.",
    ),
    supported("truncation_side", "The side that is cut off: right by default, or left."),
    harmless("request_id", "Responses have no id; send the header X-Request-Id for the log."),
    harmless("priority", "Requests are answered in their order."),
    harmless("cache_salt", "Encoders do not use a prefix cache."),
)
_EMBEDDINGS = (
    *COMMON,
    supported("input", "A text or token ids, or a list of them. Send it, or messages."),
    *CONVERSATION,
    supported("encoding_format", "float or base64."),
    supported("dimensions", "The length of the vectors, if the model was trained for it."),
    supported("normalize", "Normalize vectors to length 1; by default as in the checkpoint."),
    supported("use_activation", "The same, as newer versions of vLLM call it."),
    supported("add_special_tokens", "True by default for input, false for messages."),
    *_ENCODER,
    refused("padding", "Texts are not padded.", off=("do_not_pad",)),
    refused("embed_dtype", "Numbers are float32.", off=("float32",)),
    refused("endianness", "Numbers are little-endian.", off=("native", "little")),
)
_ALWAYS_ACTIVATED = "Scores go through the checkpoint's activation function."
_SCORING = (
    *COMMON,
    *_ENCODER,
    refused("use_activation", _ALWAYS_ACTIVATED, off=(True,)),
    refused("activation", _ALWAYS_ACTIVATED, off=(True,)),
    refused("mm_processor_kwargs", "The model takes text only.", off=({},)),
)
_SCORE = (
    *_SCORING,
    supported("text_1", "The first text of every pair, or a list with one for each pair."),
    supported("text_2", "The second text, or a list of them."),
    *(
        refused(name, "Send text_1 and text_2.")
        for name in ("data_1", "data_2", "queries", "items", "documents")
    ),
)
_RERANK = (
    *_SCORING,
    supported("query", "The first text of every pair."),
    supported("documents", "The second texts: strings or objects."),
    supported("documents.text", "The text of a document."),
    supported("top_n", "The maximum number of results; 0: all."),
    supported("return_documents", "True by default; false leaves the texts out."),
    refused("rank_fields", "Documents have one field, text.", off=([], ["text"])),
    refused("max_chunks_per_doc", "Documents are not split; use truncate_prompt_tokens."),
    refused("max_tokens_per_doc", "Use truncate_prompt_tokens."),
)
_PROCESS = (
    *COMMON,
    supported("data", "Goes to the I/O processor.", is_open=True),
    supported("priority", "With --scheduling-policy priority, a lower number goes first."),
    CACHE_SALT,
)
_TOKENIZE = (
    *COMMON,
    supported("prompt", "A text. Send it, or messages."),
    supported("add_special_tokens", "True by default for a prompt, false for messages."),
    supported("return_token_strs", "Also return the tokens as strings of the vocabulary."),
    *CONVERSATION,
)
_DETOKENIZE = (*COMMON, supported("tokens", "Token ids."))

ENDPOINTS = {
    "completions": Endpoint("/v1/completions", _COMPLETIONS),
    "chat": Endpoint("/v1/chat/completions", _CHAT),
    "embeddings": Endpoint("/v1/embeddings", _EMBEDDINGS),
    "rerank": Endpoint("/v1/rerank", _RERANK),
    "score": Endpoint("/v1/score", _SCORE),
    "responses": Endpoint("/v1/responses", RESPONSES),
    "process": Endpoint("/v1/process", _PROCESS),
    "tokenize": Endpoint("/tokenize", _TOKENIZE),
    "detokenize": Endpoint("/detokenize", _DETOKENIZE),
}
