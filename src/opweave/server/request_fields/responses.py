"""Fields of ``/v1/responses``."""

from __future__ import annotations

from opweave.server.request_fields.row import harmless, refused, supported

_NOT_STORED = "Nothing is stored; send the whole conversation as input."

RESPONSES = (
    supported("model", "The name of a served model. Missing or empty: the served model."),
    supported(
        "input",
        "A text, or a list of messages, function_call, function_call_output and reasoning items.",
        is_open=True,
    ),
    supported("instructions", "A system message before the input."),
    supported("max_output_tokens", "The most tokens of the answer."),
    supported("temperature", "0 takes the most likely token; at most 2."),
    supported("top_p", "Sample from the most likely tokens that reach this probability."),
    supported("stream", "Send the answer as server-sent events."),
    supported("text", "The form of the answer."),
    supported("text.format", "text, json_object or json_schema, with a schema.", is_open=True),
    refused("text.verbosity", "Ask for it in the input.", off=("medium",)),
    supported("tools", "Functions that the model may call.", is_open=True),
    supported("tool_choice", "none, auto, required, or the function to call.", is_open=True),
    supported("parallel_tool_calls", "Whether there may be several calls; true by default."),
    supported("metadata", "Returned in the response.", is_open=True),
    refused("top_logprobs", "Use /v1/chat/completions.", off=(0,)),
    refused("include", "There is nothing to include.", off=([],)),
    refused("reasoning", "Use chat_template_kwargs of /v1/chat/completions.", off=({},)),
    refused("max_tool_calls", "The server calls no tools."),
    refused("truncation", "Shorten the input.", off=("disabled",)),
    refused("background", _NOT_STORED, off=(False,)),
    refused("background_options", _NOT_STORED),
    refused("context_management", _NOT_STORED, off=([],)),
    refused("conversation", _NOT_STORED),
    refused("previous_response_id", _NOT_STORED),
    refused("prompt", _NOT_STORED),
    refused("image", "Answers are text only."),
    refused("moderation", "There is no moderation."),
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
