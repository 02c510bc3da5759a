"""How to constrain and parse the output of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from opweave_engine import MissingDependencyError, SamplingParams, Tokenizer
from opweave_engine.server.errors import ApiError
from opweave_engine.server.output_parser import (
    BEGIN,
    END,
    AnswerParser,
    CallFormat,
    OutputStyle,
    answer_grammar,
    is_thinking,
)
from opweave_engine.server.protocol.sampling import ToolUse, form_error


@dataclass(frozen=True)
class AnswerPlan:
    """How to constrain an output, and how to parse it.

    Attributes:
        style: the formats that the model writes.
        use: the tool use of the request.
        prompt: the text that the model continues.
        form_field: the request field that constrains the form of the output.
    """

    style: OutputStyle
    use: ToolUse
    prompt: str
    form_field: str

    def __post_init__(self) -> None:
        if self.use.required is not None and self.style.calls is None:
            raise ApiError(
                "tool_choice needs a format of tool calls: the server runs with "
                "--tool-call-parser none.",
                param="tool_choice",
                code="unsupported",
            )

    @property
    def calls(self) -> type[CallFormat] | None:
        """The format of tool calls, if the model may call a function."""
        return self.style.calls if self.use.tools else None

    @property
    def has_reasoning(self) -> bool:
        """Whether the output may begin with reasoning, which the prompt has not ended."""
        return self.style.has_reasoning and not self.prompt.rstrip().endswith(END)

    @property
    def source_field(self) -> str:
        """The field of the request that the constraint comes from."""
        return self.form_field if self.use.required is None else "tools"

    def parser(self) -> AnswerParser:
        """Return a parser for one output."""
        return AnswerParser(
            self.calls,
            names=self.use.names,
            has_reasoning=self.has_reasoning,
            is_thinking=self.has_reasoning and is_thinking(self.prompt),
            is_parallel=self.use.is_parallel,
        )

    def constrained(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """Return *params* with the constraint, and with the special tokens that formats need.

        Raises:
            ApiError: the constraint is invalid or cannot be compiled.
        """
        special = self._special_tokens(tokenizer)
        params = replace(params, kept_special_tokens=sorted(special.values()))
        form = None if self.use.required is not None else params.structured_outputs
        functions = self.use.required if form is None else self.use.functions
        if not functions and (form is None or not self.has_reasoning):
            return params
        reasoning = None
        if self.has_reasoning:
            reasoning = "inside" if is_thinking(self.prompt) else "may"
        try:
            grammar = answer_grammar(
                layout=self.calls.layout(self.style.template) if self.calls and functions else None,
                functions=functions or (),
                is_parallel=self.use.is_parallel,
                form=form,
                reasoning=reasoning,
                special=special,
            )
        except (ValueError, MissingDependencyError) as error:
            raise form_error(error, self.source_field) from error
        return replace(params, structured_outputs=grammar)

    def _special_tokens(self, tokenizer: Tokenizer) -> Mapping[str, int]:
        markers = {*(self.calls.markers if self.calls else ())}
        markers |= {BEGIN, END} if self.has_reasoning else set()
        named = {tokenizer.token(token): token for token in tokenizer.special_ids if markers}
        return {name: token for name, token in named.items() if name in markers}
