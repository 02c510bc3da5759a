"""Fields of requests for text, which completions and chat completions share."""

from __future__ import annotations

from opweave.server.request_fields.row import harmless, refused, supported

_NO_BEAMS = "There is no beam search; use n with a temperature."
_NO_REPETITION = "Repeated text does not end an answer; use repetition_penalty."

COMMON = (
    supported("model", "The name of a served model. Missing or empty: the served model."),
    harmless("user", "Not used."),
    refused(
        "cache_salt",
        "Requests share the prefix cache; start the server with --no-prefix-caching.",
    ),
)

SAMPLING = (
    supported("max_tokens", "The most tokens of an answer."),
    supported("temperature", "0 takes the most likely token; at most 2."),
    supported("top_p", "Sample from the most likely tokens that reach this probability."),
    supported("n", "The number of answers."),
    supported("stop", "One or more strings that end the answer."),
    supported("seed", "Makes sampling reproducible."),
    supported("presence_penalty", "From -2 to 2."),
    supported("frequency_penalty", "From -2 to 2."),
    supported("logit_bias", "Added to the scores of tokens, by id.", is_open=True),
    supported("top_k", "Sample from this many most likely tokens; 0 and -1: all."),
    supported("min_p", "Leave out tokens less likely than this, relative to the best one."),
    supported("repetition_penalty", "Above 1, repeated tokens become less likely."),
    supported("stop_token_ids", "Tokens that end the answer."),
    supported("min_tokens", "Nothing ends the answer before it has so many tokens."),
    supported("ignore_eos", "Go on after an end-of-text token."),
    supported("skip_special_tokens", "Leave special tokens out of the text; true by default."),
    refused("spaces_between_special_tokens", "Spaces are as the tokenizer writes.", off=(True,)),
    refused("include_stop_str_in_output", "Stop strings are left out.", off=(False,)),
    refused("allowed_token_ids", "Use logit_bias.", off=([],)),
    refused("bad_words", "Use logit_bias.", off=([],)),
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
    supported("stream_options.include_usage", "The last event has the numbers of tokens."),
    refused("stream_options.continuous_usage_stats", "Use include_usage.", off=(False,)),
    harmless("stream_options.include_obfuscation", "Events are not padded."),
    supported("priority", "With --scheduling-policy priority, a lower number goes first."),
    refused("request_id", "Send the header X-Request-Id."),
    refused("add_special_tokens", "The tokenizer decides."),
    refused("truncate_prompt_tokens", "Shorten the prompt."),
    refused("truncation_side", "Shorten the prompt."),
    refused("prompt_logprobs", "Use echo and logprobs of /v1/completions."),
    refused("return_token_ids", "Use /tokenize.", off=(False,)),
    refused("return_tokens_as_token_ids", "Use /tokenize.", off=(False,)),
    refused("kv_transfer_params", "There is no disaggregated serving.", off=({},)),
    refused("vllm_xargs", "There are no such extensions.", off=({},)),
)

_NO_TAGS = "Structural tags are not supported; use a grammar."

STRUCTURED = (
    supported("response_format", "The form of the answer."),
    supported("response_format.type", "text, json_object or json_schema."),
    supported("response_format.json_schema", "The answer is JSON that satisfies a schema."),
    supported("response_format.json_schema.schema", "The JSON schema.", is_open=True),
    harmless("response_format.json_schema.name", "Not used."),
    harmless("response_format.json_schema.description", "Not used."),
    harmless("response_format.json_schema.strict", "The schema is always enforced."),
    refused("response_format.format", _NO_TAGS),
    refused("response_format.structures", _NO_TAGS),
    refused("response_format.triggers", _NO_TAGS),
    supported("structured_outputs", "The form of the answer, in vLLM's words."),
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
