"""Fields of conversations, and of what a model may do besides writing text."""

from __future__ import annotations

from opweave_engine.server.request_fields.row import harmless, refused, supported

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
