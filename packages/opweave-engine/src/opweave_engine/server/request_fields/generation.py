"""Fields of requests for text, which completions and chat completions share."""

from __future__ import annotations

from opweave_engine.server.request_fields.row import harmless, refused, supported

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
    supported("stop", "One or more strings that end the answer."),
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
