"""The table of request fields: which ones are supported, harmless or refused, by endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from opweave.errors import shown
from opweave_engine.server.errors import unsupported

# One row of the table of request fields.


Status = Literal["supported", "harmless", "refused"]


@dataclass(frozen=True)
class Row:
    """How the server handles one request field.

    Attributes:
        path: the field's name, prefixed with the names of the fields that contain it: ``a.b``.
            Lists do not appear in the path: ``messages.content.type`` is in a list in a list.
        status: ``supported``: it has its documented effect. ``harmless``: it has no effect here,
            and cannot change the answer. ``refused``: a request that sets it gets a 400.
        note: the effect; or the reason and the alternative if it has no effect.
        off: values of a refused field that turn the feature off, and are accepted, like null.
        is_open: whether an object may have fields of any name, which are passed on unchanged.
    """

    path: str
    status: Status
    note: str
    off: tuple[object, ...] = ()
    is_open: bool = False

    def is_off(self, value: object) -> bool:
        """Return whether *value* turns the feature off."""
        return value is None or any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off
        )


def supported(path: str, note: str, *, is_open: bool = False) -> Row:
    """Return the row of a field that has its documented effect."""
    return Row(path, "supported", note, is_open=is_open)


def harmless(path: str, note: str) -> Row:
    """Return the row of a field that cannot change the answer; its value is ignored."""
    return Row(path, "harmless", note, is_open=True)


def refused(path: str, note: str, *, off: tuple[object, ...] = ()) -> Row:
    """Return the row of a field that is an error unless its value is null or in *off*."""
    return Row(path, "refused", note, off)


# Fields of requests for text, which completions and chat completions share.


_NO_BEAMS = "There is no beam search; use n with a temperature."
_NO_REPETITION = "Repeated text does not end an answer; use repetition_penalty."

COMMON = (
    supported("model", "The name of a served model. Missing or empty: the served model."),
    harmless("user", "Not used."),
)
CACHE_SALT = supported("cache_salt", "Cached prefixes are shared only with the same salt.")

SAMPLING = (
    supported("max_tokens", "The maximum number of tokens of an answer."),
    supported("temperature", "From 0, which is greedy, to 2."),
    supported("top_p", "Sample from the most likely tokens that reach this probability."),
    supported("n", "The number of answers."),
    supported("stop", "Up to 64 strings, of at most 4096 characters, that end the answer."),
    supported("seed", "Makes sampling reproducible."),
    supported("presence_penalty", "From -2 to 2."),
    supported("frequency_penalty", "From -2 to 2."),
    supported("logit_bias", "Added to the logits of tokens, by token id.", is_open=True),
    supported("top_k", "Sample from this many most likely tokens; 0 and -1: all."),
    supported("min_p", "Leave out tokens less likely than this, relative to the best one."),
    supported("repetition_penalty", "Above 1, repeated tokens become less likely."),
    supported("stop_token_ids", "Tokens that end the answer."),
    supported("min_tokens", "The minimum number of tokens of an answer."),
    supported("ignore_eos", "Continue after an end-of-text token."),
    supported("skip_special_tokens", "Leave special tokens out of the text; true by default."),
    supported(
        "spaces_between_special_tokens",
        "False removes the space that some tokenizers write between two special tokens.",
    ),
    supported("include_stop_str_in_output", "The text ends with the stop string or token."),
    supported("allowed_token_ids", "Sample only these tokens."),
    supported(
        "bad_words",
        "The token that would complete one of these texts is not chosen; others can spell it.",
    ),
    refused("use_beam_search", _NO_BEAMS, off=(False,)),
    refused("length_penalty", _NO_BEAMS, off=(1,)),
    refused("early_stopping", _NO_BEAMS, off=(False,)),
    refused("logits_processors", "Requests cannot bring code; write a plugin.", off=([],)),
    refused("repetition_detection", _NO_REPETITION),
    refused("max_repetition_pattern_size", _NO_REPETITION, off=(0,)),
    refused("min_repetition_pattern_size", _NO_REPETITION, off=(0,)),
    refused("repetition_min_count", _NO_REPETITION, off=(0,)),
    refused("logprob_token_ids", "Use logprobs.", off=([],)),
)

REQUEST = (
    supported("stream", "Send the answer as server-sent events."),
    supported("stream_options", "Only with stream=true."),
    supported("stream_options.include_usage", "The last event has the token counts."),
    supported("stream_options.continuous_usage_stats", "Every event has the token counts so far."),
    harmless("stream_options.include_obfuscation", "Events are not padded."),
    CACHE_SALT,
    supported("priority", "With --scheduling-policy priority, a lower number goes first."),
    supported("request_id", "The end of the id of the response."),
    supported(
        "add_special_tokens",
        "Add the tokenizer's special tokens: true by default for a prompt, false for messages.",
    ),
    supported(
        "truncate_prompt_tokens",
        "Truncate the prompt to its last tokens; -1 leaves room for max_tokens.",
    ),
    refused("truncation_side", "The last tokens are kept.", off=("left",)),
    supported("prompt_logprobs", "Log-probabilities of the prompt; not in streams."),
    supported("return_token_ids", "Also return token_ids and prompt_token_ids."),
    supported("return_tokens_as_token_ids", "In logprobs, represent a token as token_id:17."),
    refused("kv_transfer_params", "Disaggregated serving is not supported.", off=({},)),
    refused("vllm_xargs", "vLLM's extensions are not supported.", off=({},)),
)

_NO_TAGS = "Structural tags are not supported; use a grammar."

STRUCTURED = (
    supported("response_format", "The form of the answer."),
    supported("response_format.type", "text, json_object or json_schema."),
    supported("response_format.json_schema", "The answer is JSON that satisfies a schema."),
    supported("response_format.json_schema.schema", "The JSON schema.", is_open=True),
    supported(
        "response_format.schema",
        "The JSON schema, with type json_object or json_schema.",
        is_open=True,
    ),
    harmless("response_format.json_schema.name", "Not used."),
    harmless("response_format.json_schema.description", "Not used."),
    harmless("response_format.json_schema.strict", "The schema is always enforced."),
    refused("response_format.format", _NO_TAGS),
    refused("response_format.structures", _NO_TAGS),
    refused("response_format.triggers", _NO_TAGS),
    supported("structured_outputs", "The form of the answer, as in vLLM."),
    supported("structured_outputs.json", "A JSON schema.", is_open=True),
    supported("structured_outputs.json_object", "Any JSON object."),
    supported("structured_outputs.regex", "A regular expression for the whole answer."),
    supported("structured_outputs.choice", "The answer is one of these texts."),
    supported("structured_outputs.grammar", "A grammar in Lark or GBNF notation."),
    supported("structured_outputs.disable_any_whitespace", "Write JSON without whitespace."),
    supported(
        "structured_outputs.disable_additional_properties",
        "JSON objects have only the properties that the schema names.",
    ),
    supported("structured_outputs.whitespace_pattern", "The optional whitespace in JSON."),
    harmless("structured_outputs.disable_fallback", "There is one implementation."),
    refused("structured_outputs.structural_tag", _NO_TAGS),
    supported("guided_json", "As structured_outputs.json.", is_open=True),
    supported("guided_regex", "As structured_outputs.regex."),
    supported("guided_choice", "As structured_outputs.choice."),
    supported("guided_grammar", "As structured_outputs.grammar."),
    supported("guided_whitespace_pattern", "As structured_outputs.whitespace_pattern."),
    harmless("guided_decoding_backend", "There is one implementation."),
)


# Fields of conversations, and of what a model may do besides writing text.


_TEXT_ONLY = "The model takes text only."
_FUNCTIONS = "Use tool_choice."
_REASONING = "Use chat_template_kwargs, if the chat template has such a variable."

CONVERSATION = (
    supported(
        "messages",
        "The conversation. Fields of messages that are not listed go to the chat template.",
        is_open=True,
    ),
    supported("messages.role", "The author's role: one that the chat template accepts."),
    supported("messages.content", "Text, or a list of parts; null is empty text."),
    supported(
        "messages.content.type", "text, input_text, output_text, refusal or thinking: all are text."
    ),
    supported("messages.content.text", "The text of the part."),
    supported("messages.content.refusal", "The text of a part of that type."),
    supported("messages.content.thinking", "The text of a part of that type."),
    harmless("messages.content.prompt_cache_breakpoint", "The prefix cache needs no hints."),
    refused("messages.content.image_url", _TEXT_ONLY),
    refused("messages.content.image_embeds", _TEXT_ONLY),
    refused("messages.content.video_url", _TEXT_ONLY),
    refused("messages.content.audio_url", _TEXT_ONLY),
    refused("messages.content.input_audio", _TEXT_ONLY),
    refused("messages.content.file", _TEXT_ONLY),
    refused("messages.audio", _TEXT_ONLY),
    refused("messages.function_call", "Use messages.tool_calls."),
    refused("messages.refusal", "Send it as content."),
    supported("messages.name", "Goes to the chat template."),
    supported("messages.tool_call_id", "Goes to the chat template."),
    supported(
        "messages.tool_calls",
        "Go to the chat template, with arguments as it prints them: objects or JSON text.",
        is_open=True,
    ),
    supported(
        "add_generation_prompt",
        "End the prompt with the header of an answer; default: not continue_final_message.",
    ),
    supported("continue_final_message", "End the prompt with the text of the last message."),
    supported(
        "chat_template",
        "A name such as tool_use, or, with --trust-request-chat-template, a template.",
    ),
    supported("chat_template_kwargs", "Variables for the chat template.", is_open=True),
    supported("documents", "Documents for the chat template to print.", is_open=True),
    supported("tools", "Functions that the model may call.", is_open=True),
    refused("mm_processor_kwargs", _TEXT_ONLY, off=({},)),
    refused("media_io_kwargs", _TEXT_ONLY, off=({},)),
)

ABILITIES = (
    supported("tool_choice", "none, auto, required, or the function to call.", is_open=True),
    supported("parallel_tool_calls", "Whether there may be several calls; true by default."),
    refused("functions", "Describe them in tools.", off=([],)),
    refused("function_call", _FUNCTIONS, off=("none", "auto")),
    refused("reasoning_effort", _REASONING),
    supported("include_reasoning", "Return the reasoning; true by default."),
    refused("thinking_token_budget", "Use max_tokens.", off=(-1,)),
    refused("verbosity", "Ask for it in a message.", off=("medium",)),
    refused("audio", "Answers are text only."),
    refused("modalities", 'Answers are text only; the list may hold "text".', off=([], ["text"])),
    refused("moderation", "Moderation is not supported."),
    refused("web_search_options", "The server does not search the web."),
)

STORAGE = (
    harmless("metadata", "Nothing is stored."),
    harmless("store", "Nothing is stored."),
    harmless("safety_identifier", "Not used."),
    harmless("prompt_cache_key", "The prefix cache needs no hints."),
    harmless("prompt_cache_options", "The prefix cache needs no hints."),
    harmless("prompt_cache_retention", "The prefix cache needs no hints."),
    harmless("service_tier", "There is one tier."),
)


# Fields of ``/v1/responses``.


_USE_CHAT = "Use /v1/chat/completions."
_NOT_STORED = "Nothing is stored; send the whole conversation as input."

RESPONSES = (
    supported("model", "The name of a served model. Missing or empty: the served model."),
    supported(
        "input",
        "A text, or a list of messages, function_call, function_call_output and reasoning items.",
        is_open=True,
    ),
    supported("instructions", "A system message before the input."),
    supported("max_output_tokens", "The maximum number of tokens of the answer."),
    supported("temperature", "From 0, which is greedy, to 2."),
    supported("top_p", "Sample from the most likely tokens that reach this probability."),
    supported("stream", "Send the answer as server-sent events."),
    supported("text", "The form of the answer."),
    supported("text.format", "text, json_object or json_schema, with a schema.", is_open=True),
    refused("text.verbosity", "Ask for it in the input.", off=("medium",)),
    supported("tools", "Functions that the model may call.", is_open=True),
    supported("tool_choice", "none, auto, required, or the function to call.", is_open=True),
    supported("parallel_tool_calls", "Whether there may be several calls; true by default."),
    supported("metadata", "Returned in the response.", is_open=True),
    CACHE_SALT,
    refused("top_logprobs", _USE_CHAT, off=(0,)),
    refused("include", "Additional output data is not supported.", off=([],)),
    refused("reasoning", "Use chat_template_kwargs of /v1/chat/completions.", off=({},)),
    refused("top_k", _USE_CHAT, off=(0, -1)),
    refused("min_p", _USE_CHAT, off=(0,)),
    refused("repetition_penalty", _USE_CHAT, off=(1,)),
    refused("presence_penalty", _USE_CHAT, off=(0,)),
    refused("frequency_penalty", _USE_CHAT, off=(0,)),
    refused("logit_bias", _USE_CHAT, off=({},)),
    refused("seed", _USE_CHAT),
    refused("stop", _USE_CHAT, off=([],)),
    refused("skip_special_tokens", _USE_CHAT, off=(True,)),
    refused("include_stop_str_in_output", _USE_CHAT, off=(False,)),
    refused("ignore_eos", _USE_CHAT, off=(False,)),
    refused("structured_outputs", "Use text.format."),
    refused("request_id", "The server generates the ids of responses."),
    refused("priority", _USE_CHAT, off=(0,)),
    refused("mm_processor_kwargs", "The model takes text only.", off=({},)),
    refused("vllm_xargs", "vLLM's extensions are not supported.", off=({},)),
    refused("kv_transfer_params", "Disaggregated serving is not supported.", off=({},)),
    refused("previous_input_messages", _NOT_STORED, off=([],)),
    refused("enable_response_messages", "Messages are not returned.", off=(False,)),
    refused("max_tool_calls", "The server does not call tools."),
    refused("truncation", "Shorten the input.", off=("disabled",)),
    refused("background", _NOT_STORED, off=(False,)),
    refused("background_options", _NOT_STORED),
    refused("context_management", _NOT_STORED, off=([],)),
    refused("conversation", _NOT_STORED),
    refused("previous_response_id", _NOT_STORED),
    refused("prompt", _NOT_STORED),
    refused("image", "Answers are text only."),
    refused("moderation", "Moderation is not supported."),
    refused("access_programs", "There are no programs."),
    harmless("stream_options", "Events are not padded."),
    harmless("store", "Nothing is stored."),
    harmless("user", "Not used."),
    harmless("safety_identifier", "Not used."),
    harmless("prompt_cache_key", "The prefix cache needs no hints."),
    harmless("prompt_cache_options", "The prefix cache needs no hints."),
    harmless("prompt_cache_retention", "The prefix cache needs no hints."),
    harmless("service_tier", "There is one tier."),
)


# Checks requests against the table of request fields.


_MAX_UNKNOWN = 1024  # paths of one request; only a few of them are reported


@dataclass
class _Node:
    """A field, and the fields that it may contain."""

    row: Row | None
    children: dict[str, _Node] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.row is not None and self.row.is_open


class FieldTable:
    """The fields of the requests to one endpoint.

    Args:
        rows: one for each field; the field that contains another one comes first.

    Attributes:
        rows: by path, in the given order.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: dict[str, Row] = {}
        self._root = _Node(None)
        for row in rows:
            if row.path in self.rows:
                raise ValueError(f"the field {row.path!r} has two rows")
            self.rows[row.path] = row
            node = self._root
            *parents, name = row.path.split(".")
            for parent in parents:
                node = node.children[parent]
            node.children[name] = _Node(row)

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Return the first paths of fields in *values* that the table does not have, sorted.

        Raises:
            ApiError: a refused field is set.
        """
        unknown: set[str] = set()
        _check(values, self._root, "", unknown)
        return sorted(unknown)


def _check(values: Mapping[str, Any], node: _Node, prefix: str, unknown: set[str]) -> None:
    for name, value in values.items():
        path, child = prefix + name, node.children.get(name)
        if child is None or child.row is None:
            if not node.is_open and len(unknown) < _MAX_UNKNOWN:
                unknown.add(path)
            continue
        if child.row.status == "refused" and not child.row.is_off(value):
            raise unsupported(path, f"{path}={shown(value)}", child.row.note)
        if child.children:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    _check(part, child, f"{path}.", unknown)


# The fields of every endpoint.


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
