"""Sampling parameters, structured output and tools in requests."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field

from opweave_engine import SamplingParams, SamplingParamsError, StructuredOutputsParams
from opweave_engine.server.errors import ApiError, unsupported
from opweave_engine.server.output_parser import Function
from opweave_engine.server.protocol.base import (
    Int,
    Items,
    RequestBody,
    RequestFields,
    StopsAtFault,
    Text,
    TokenIds,
    Unused,
    check_unicode,
    harmless,
    refused,
    supported,
)

# The fields for structured output, of OpenAI and of vLLM.


Schema = dict[str, Any] | bool
_GUIDED_KINDS = ("json", "regex", "choice", "grammar")
_NO_TAGS = "Structural tags are not supported; use a grammar."


class JsonSchema(RequestFields):
    """A JSON schema with a name."""

    schema_: Schema | None = supported("The JSON schema.", alias="schema")
    name: Unused = harmless("Not used.")
    description: Unused = harmless("Not used.")
    strict: Unused = harmless("The schema is always enforced.")


class ResponseFormat(RequestFields):
    """Free text, any JSON object, or JSON that satisfies a schema."""

    type: Text | None = Field(description="text, json_object or json_schema.")
    json_schema: JsonSchema | None = supported("The answer is JSON that satisfies a schema.")
    schema_: Schema | None = supported(
        "The JSON schema, with type json_object or json_schema.", alias="schema"
    )
    format: Unused = refused(_NO_TAGS)
    structures: Unused = refused(_NO_TAGS)
    triggers: Unused = refused(_NO_TAGS)

    def options(self) -> dict[str, Any]:
        """Return the fields of StructuredOutputsParams; none for free text.

        Raises:
            ApiError: the type is unknown, or does not fit the schema.
        """
        kind, schema = "text" if self.type is None else self.type, self.schema_
        if kind not in ("text", "json_object", "json_schema"):
            raise unsupported(
                "response_format.type",
                f"response_format.type={kind!r}",
                "It may be 'text', 'json_object' or 'json_schema'.",
            )
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            if schema is not None:
                raise ApiError(
                    "response_format has json_schema.schema and schema; give one of them.",
                    param="response_format",
                )
            schema = self.json_schema.schema_
        if kind == "text" and schema is not None:
            raise ApiError(
                f"response_format has a schema, but type={self.type!r}; for JSON that satisfies "
                "the schema, the type is 'json_schema'.",
                param="response_format",
            )
        if kind == "json_schema" and schema is None:
            raise ApiError(
                "response_format of type 'json_schema' needs json_schema.schema.",
                param="response_format",
            )
        if kind == "json_object" and isinstance(schema, dict):  # it may allow other values, too
            return {"json": {"type": "object", **schema}}
        if kind == "json_object" and schema is not False:
            return {"json_object": True}
        return {} if kind == "text" else {"json": schema}


class StructuredOutputs(RequestFields):
    """The fields of :class:`opweave_engine.StructuredOutputsParams`."""

    json_: Schema | Text | None = supported("A JSON schema.", alias="json")
    regex: Text | None = supported("A regular expression for the whole answer.")
    choice: Items[Text] | None = supported("The answer is one of these texts.")
    grammar: Text | None = supported("A grammar in Lark or GBNF notation.")
    json_object: bool | None = supported("Any JSON object.")
    disable_any_whitespace: bool | None = supported("Write JSON without whitespace.")
    disable_additional_properties: bool | None = supported("Only the schema's properties.")
    whitespace_pattern: Text | None = supported("The optional whitespace in JSON.")
    disable_fallback: Unused = harmless("There is one implementation.")
    structural_tag: Unused = refused(_NO_TAGS)


class FormFields(RequestBody):
    """The fields for structured output; at most one may be set."""

    response_format: ResponseFormat | None = supported("The form of the answer.")
    structured_outputs: StructuredOutputs | None = supported("The form of the answer, as in vLLM.")
    guided_json: Schema | Text | None = supported("As structured_outputs.json.")
    guided_regex: Text | None = supported("As structured_outputs.regex.")
    guided_choice: Items[Text] | None = supported("As structured_outputs.choice.")
    guided_grammar: Text | None = supported("As structured_outputs.grammar.")
    guided_whitespace_pattern: Text | None = supported("As structured_outputs.whitespace_pattern.")
    guided_decoding_backend: Unused = harmless("There is one implementation.")

    @property
    def form_field(self) -> str:
        """The field that is set."""
        return next((name for name, _ in self._forms()), "structured_outputs")

    def form(self) -> StructuredOutputsParams | None:
        """Return the constraint, or None for free text.

        Raises:
            ApiError: several fields are set, or one contradicts itself.
        """
        forms = dict(self._forms())
        if not forms:
            return None
        name, *others = forms
        if others:
            raise ApiError(
                f"{' and '.join(forms)} both say what form the answer must have; give one of them.",
                param=others[0],
            )
        options = {key: value for key, value in forms[name].items() if value is not None}
        try:
            return StructuredOutputsParams(**options)
        except SamplingParamsError as error:
            raise form_error(error, name) from error

    def _forms(self) -> Iterator[tuple[str, dict[str, Any]]]:
        spaces = {"whitespace_pattern": self.guided_whitespace_pattern}
        if self.response_format is not None and (options := self.response_format.options()):
            yield "response_format", {**options, **spaces}
        if (form := self.structured_outputs) is not None:
            names = [parameter.name for parameter in fields(StructuredOutputsParams)]
            values = {n: getattr(form, "json_" if n == "json" else n) for n in names}
            yield "structured_outputs", values
        for kind in _GUIDED_KINDS:
            if (value := getattr(self, f"guided_{kind}")) is not None:
                yield f"guided_{kind}", {kind: value, **spaces}


def form_error(error: Exception, field: str) -> ApiError:
    """Return *error* about structured output, with the name of the request field."""
    return ApiError(str(error).replace("structured_outputs", field, 1), param=field)


# Sampling parameters in requests.


_MAX_STOPS, _MAX_STOP_CHARACTERS = 64, 4096  # the matcher's table takes a second for megabytes
_MAX_WORDS, _MAX_WORD_CHARACTERS = 256, 256  # all words are tokenized at once
_NO_BEAMS = "There is no beam search; use n with a temperature."
_NO_REPETITION = "Repeated text does not end an answer; use repetition_penalty."
SALT_NOTE = "Cached prefixes are shared only with the same salt."
PRIORITY_NOTE = "With --scheduling-policy priority, a lower number goes first."
_MAX_TEMPERATURE = 2.0  # as in OpenAI's API; SamplingParams has no limit


Priority = Annotated[Int, Field(ge=-(2**31), lt=2**31)]
CacheSalt = Annotated[Text, Field(min_length=1)]
StopString = Annotated[str, Field(max_length=_MAX_STOP_CHARACTERS), AfterValidator(check_unicode)]
BadWord = Annotated[Text, Field(max_length=_MAX_WORD_CHARACTERS)]


def _token(key: object) -> object:
    """Convert a JSON key to a token id; ``int`` accepts more than decimal numbers."""
    if isinstance(key, str) and not re.fullmatch(r"-?[0-9]+", key):
        raise ValueError(f"{key!a} is not an integer")
    return key


TokenKey = Annotated[int, BeforeValidator(_token), Field(strict=False)]


class StreamOptions(RequestFields):
    """Options of a stream."""

    include_usage: bool | None = supported("The last event has the token counts.")
    continuous_usage_stats: bool | None = supported("Every event has the token counts so far.")
    include_obfuscation: Unused = harmless("Events are not padded.")


class SamplingFields(FormFields):
    """The fields of :class:`opweave_engine.SamplingParams`; None means its default."""

    max_tokens: Int | None = supported("The maximum number of tokens of an answer.")
    temperature: float | None = supported("From 0, which is greedy, to 2.")
    top_p: float | None = supported("Sample from the most likely tokens up to this probability.")
    n: Int | None = supported("The number of answers.")
    stop: StopString | Annotated[Items[StopString], Field(max_length=_MAX_STOPS)] | None = (
        supported("Up to 64 strings, of at most 4096 characters, that end the answer.")
    )
    seed: Int | None = supported("Makes sampling reproducible.")
    presence_penalty: float | None = supported("From -2 to 2.")
    frequency_penalty: float | None = supported("From -2 to 2.")
    logit_bias: Annotated[dict[TokenKey, float], StopsAtFault] | None = supported(
        "Added to the logits of tokens, by token id."
    )
    top_k: Int | None = supported("Sample from this many most likely tokens; 0 and -1: all.")
    min_p: float | None = supported("Leave out tokens less likely than this, relative to the best.")
    repetition_penalty: float | None = supported("Above 1, repeated tokens become less likely.")
    stop_token_ids: TokenIds | None = supported("Tokens that end the answer.")
    min_tokens: Int | None = supported("The minimum number of tokens of an answer.")
    ignore_eos: bool | None = supported("Continue after an end-of-text token.")
    skip_special_tokens: bool | None = supported("Leave out special tokens; true by default.")
    spaces_between_special_tokens: bool | None = supported("False joins adjacent special tokens.")
    include_stop_str_in_output: bool | None = supported("The text keeps the stop string or token.")
    allowed_token_ids: TokenIds | None = supported("Sample only these tokens.")
    bad_words: Annotated[Items[BadWord], Field(max_length=_MAX_WORDS)] | None = supported(
        "The token that would complete one of these texts is not chosen; others can spell it."
    )
    use_beam_search: Unused = refused(_NO_BEAMS, False)
    length_penalty: Unused = refused(_NO_BEAMS, 1)
    early_stopping: Unused = refused(_NO_BEAMS, False)
    logits_processors: Unused = refused("Requests cannot bring code; write a plugin.", [])
    repetition_detection: Unused = refused(_NO_REPETITION)
    max_repetition_pattern_size: Unused = refused(_NO_REPETITION, 0)
    min_repetition_pattern_size: Unused = refused(_NO_REPETITION, 0)
    repetition_min_count: Unused = refused(_NO_REPETITION, 0)
    logprob_token_ids: Unused = refused("Use logprobs.", [])
    stream: bool | None = supported("Send the answer as server-sent events.")
    stream_options: StreamOptions | None = supported("Only with stream=true.")
    cache_salt: CacheSalt | None = supported(SALT_NOTE)
    priority: Priority | None = supported(PRIORITY_NOTE)
    request_id: Text | None = supported("The end of the id of the response.")
    add_special_tokens: bool | None = supported(
        "Add the tokenizer's special tokens: true by default for a prompt, false for messages."
    )
    truncate_prompt_tokens: Int | None = supported(
        "Truncate the prompt to its last tokens; -1 leaves room for max_tokens."
    )
    truncation_side: Unused = refused("The last tokens are kept.", "left")
    prompt_logprobs: Int | None = supported("Log-probabilities of the prompt; not in streams.")
    return_token_ids: bool | None = supported("Also return token_ids and prompt_token_ids.")
    return_tokens_as_token_ids: bool | None = supported("In logprobs, write tokens as token_id:17.")
    kv_transfer_params: Unused = refused("Disaggregated serving is not supported.", {})
    vllm_xargs: Unused = refused("vLLM's extensions are not supported.", {})

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """Whether every event of a stream has the token usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(
        self, max_tokens: int | None, defaults: Mapping[str, Any], **others: Any
    ) -> SamplingParams:
        """Return the parameters.

        Args:
            max_tokens: the maximum number of tokens of an answer.
            defaults: the checkpoint's values for missing fields.
            others: parameters with other names in the endpoint.

        Raises:
            SamplingParamsError: a value is out of range.
            ApiError: fields for streams or for structured output contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                "stream_options are for streams only; they need stream=true.",
                param="stream_options",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                "prompt_logprobs are not sent in streams; leave out stream=true.",
                param="prompt_logprobs",
            )
        if self.temperature is not None and _MAX_TEMPERATURE < self.temperature < math.inf:
            message = f"temperature={self.temperature:g} must be at most {_MAX_TEMPERATURE:g}."
            raise SamplingParamsError(message, "temperature")
        parameters = {parameter.name for parameter in fields(SamplingParams)} - {"max_tokens"}
        shared = {n: getattr(self, n) for n in parameters & SamplingFields.model_fields.keys()}
        values = {**shared, **others, "structured_outputs": self.form()}
        sent = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**{**defaults, "max_tokens": max_tokens, **sent})


# Tool use: the functions that a model may or must call.


# As in OpenAI's API, a function without a description of its parameters has none.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """The tool use of a request.

    Attributes:
        tools: the functions as the client describes them, for the chat template.
        names: the names of the functions that may be called.
        functions: the functions whose description is sufficient to constrain a call.
        required: the functions of which one must be called; None: the model decides.
        is_parallel: whether there may be several calls.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    names: frozenset[str] = frozenset()
    functions: Sequence[Function] = ()
    required: Sequence[Function] | None = None
    is_parallel: bool = True

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: Any) -> Self:
        """Return the tool use that the fields of a request describe.

        Raises:
            ApiError: they contradict each other, or name an unknown function.
        """
        chosen = _chosen_function(choice)
        if choice == "none":
            return cls()
        if not tools:
            if choice in (None, "auto"):
                return cls(tools)
            raise ApiError(f"tool_choice={choice!r} needs tools.", param="tool_choice")
        is_parallel = parallel is not False
        if choice in (None, "auto"):
            functions = []
            for index, tool in enumerate(tools):
                with suppress(ApiError):  # other tools are left to the chat template
                    functions.append(_function(index, tool))
            names = frozenset(name for name, _ in functions)
            return cls(tools, names, functions, None, is_parallel)
        required = [_function(index, tool) for index, tool in enumerate(tools)]
        if chosen is not None:
            required = [function for function in required if function[0] == chosen]
            is_parallel = False
            if not required:
                raise ApiError(
                    f"tool_choice names the function {chosen!a}, which is not among the tools.",
                    param="tool_choice",
                )
        names = frozenset(name for name, _ in required)
        return cls(tools, names, required, required, is_parallel)


def _chosen_function(choice: Any) -> str | None:
    """Return the name of the function that must be called, if there is one.

    Raises:
        ApiError: *choice* is not valid.
    """
    if choice is None or choice in ("none", "auto", "required"):
        return None
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not name:
        raise ApiError(
            f"tool_choice={choice!r} is not supported. It may be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': NAME}}.",
            param="tool_choice",
            code="unsupported",
        )
    return str(name)


def _function(index: int, tool: Mapping[str, Any]) -> Function:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        raise ApiError(
            f"tools.{index} must be {{'type': 'function', 'function': {{'name': NAME, ...}}}}.",
            param="tools",
        )
    if schema is not None and not isinstance(schema, dict):
        raise ApiError(f"tools.{index}.function.parameters must be a JSON schema.", param="tools")
    return name, {"type": "object", **schema} if schema else _NO_PARAMETERS
