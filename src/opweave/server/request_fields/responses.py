"""Fields of ``/v1/responses``, which is not served."""

from __future__ import annotations

from opweave.server.request_fields.row import harmless, refused

_NOT_SERVED = "Use /v1/chat/completions."

RESPONSES = (
    refused("model", _NOT_SERVED),
    refused("input", _NOT_SERVED),
    refused("instructions", _NOT_SERVED),
    refused("max_output_tokens", _NOT_SERVED),
    refused("temperature", _NOT_SERVED),
    refused("top_p", _NOT_SERVED),
    refused("top_logprobs", _NOT_SERVED),
    refused("stream", _NOT_SERVED),
    refused("include", _NOT_SERVED),
    refused("text", _NOT_SERVED),
    refused("reasoning", _NOT_SERVED),
    refused("tools", _NOT_SERVED),
    refused("tool_choice", _NOT_SERVED),
    refused("parallel_tool_calls", _NOT_SERVED),
    refused("max_tool_calls", _NOT_SERVED),
    refused("truncation", _NOT_SERVED),
    refused("background", _NOT_SERVED),
    refused("background_options", _NOT_SERVED),
    refused("context_management", _NOT_SERVED),
    refused("conversation", _NOT_SERVED),
    refused("previous_response_id", _NOT_SERVED),
    refused("prompt", _NOT_SERVED),
    refused("image", _NOT_SERVED),
    refused("moderation", _NOT_SERVED),
    refused("access_programs", _NOT_SERVED),
    harmless("stream_options", "Events are not padded."),
    harmless("metadata", "Nothing is stored."),
    harmless("store", "Nothing is stored."),
    harmless("user", "Not used."),
    harmless("safety_identifier", "Not used."),
    harmless("prompt_cache_key", "The prefix cache needs no hints."),
    harmless("prompt_cache_options", "The prefix cache needs no hints."),
    harmless("prompt_cache_retention", "The prefix cache needs no hints."),
    harmless("service_tier", "There is one tier."),
)
