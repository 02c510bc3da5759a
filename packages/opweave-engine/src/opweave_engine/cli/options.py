"""Options of the commands that run a model in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter, Token

from opweave.cli.options import Flag, by_key
from opweave.cli.output import CliError, progress_bar
from opweave.config import EngineConfig, ParallelConfig
from opweave.config.engine import LoadFormat, ModelImpl
from opweave.config.terminal import ProgressBar

if TYPE_CHECKING:
    from opweave_engine import SamplingParams, StructuredOutputsParams


# Files that options name.


def read_text(option: str, file: str) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        CliError: it cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{option} {file!r} is not UTF-8 text: {error}.") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CliError(f"{option} {file!r} cannot be read: {why}.") from error


def _text_or_file(option: str, value: str | None, *marks: str) -> str | None:
    """Return *value* if it has one of *marks*, which file names do not; else the file's text."""
    if value is None or any(mark in value for mark in marks):
        return value
    return read_text(option, value)


# The option ``--chat-template-kwargs.<name>=value``, or ``--chat-template-kwargs`` and JSON.


def _variables(kind: Any, tokens: Mapping[str, Any] | Sequence[Token]) -> dict[str, Any]:
    variables = by_key(kind, tokens)
    for name, value in variables.items():
        with suppress(ValueError):  # text that is not JSON stays as it is
            variables[name] = json.loads(value) if isinstance(value, str) else value
    return variables


TemplateVariables = Annotated[
    dict[str, Any] | None,
    Parameter(
        name=("--chat-template-kwargs", "--chat_template_kwargs"),
        negative=(),
        converter=_variables,
        allow_leading_hyphen=True,  # for negative numbers
        help="Variables of the chat template: --chat-template-kwargs.enable_thinking=false, or all "
        "in one JSON object.",
    ),
]


# Options of models, engines and sampling.


T = TypeVar("T")


def configured(kind: type[T], **values: object) -> T:
    """Return a configuration with the values that are not None; a platform may set the others."""
    return kind(**{name: value for name, value in values.items() if value is not None})


def loading_bar(config: EngineConfig) -> ProgressBar:
    """Return the bar of an engine that is loading."""
    from opweave_engine.load.loader import after_loading

    return progress_bar("loading", then=after_loading(config))


_CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")  # the options for structured output


@Parameter(name="*")
@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options whose defaults are the same for all commands.

    Defaults of top_k, top_p, min_p and repetition_penalty come from the checkpoint's
    generation_config.json, if it has them.

    Parameters
    ----------
    top_k
        Sample from the k most likely tokens; 0 disables it. The default is the checkpoint's, else
        0.
    top_p
        Sample from the most likely tokens with this cumulative probability. The default is the
        checkpoint's, else 1.
    min_p
        Minimum probability of a token, relative to the most likely one. The default is the
        checkpoint's, else 0.
    presence_penalty
        From -2 to 2; subtracted from the logit of every token that is in the answer.
    frequency_penalty
        From -2 to 2; subtracted from a token's logit once for each time it is in the answer.
    repetition_penalty
        Values above 1 make tokens of the prompt and the answer less likely. The default is the
        checkpoint's, else 1.
    seed
        Seed that makes sampling reproducible.
    stop
        Stop string; ends the answer. Repeatable.
    stop_token_id
        Token id that ends an answer; repeatable.
    min_tokens
        Minimum number of tokens before an answer may end.
    ignore_eos
        Continue after an end-of-text token.
    json_schema
        JSON schema of the answer: a file, or the schema itself.
    regex
        Regular expression that the answer matches.
    choice
        A possible answer; repeatable.
    grammar
        Grammar of the answer, in Lark or GBNF notation: a file, or the grammar itself.
    skip_special_tokens
        Remove special tokens from the text.
    spaces_between_special_tokens
        Keep the space that some tokenizers write between special tokens.
    include_stop_str_in_output
        Include the stop string in the text.
    allowed_token_ids
        Token id that may be sampled; repeatable. The default is all.
    bad_words
        Text that is never generated; repeatable.
    truncate_prompt_tokens
        Truncate each prompt to its last N tokens; -1 truncates it to the context length.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, Parameter(negative=())] = None
    stop_token_id: Annotated[list[int] | None, Parameter(negative=())] = None
    min_tokens: int = 0
    ignore_eos: Flag = False
    json_schema: str | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Parameter(negative=())] = None
    grammar: str | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: Flag = False
    allowed_token_ids: Annotated[list[int] | None, Parameter(negative=())] = None
    bad_words: Annotated[list[str] | None, Parameter(negative=())] = None
    truncate_prompt_tokens: int | None = None

    def params(self, defaults: Mapping[str, object], **others: object) -> SamplingParams:
        """Return the options as sampling parameters.

        Args:
            defaults: values of options that were not given.
            others: options of the command; None: not given.

        Raises:
            SamplingParamsError: a value is out of range.
            CliError: several options constrain the answer, or a file cannot be read.
        """
        from opweave_engine import SamplingParams

        options = {**vars(self), **others, "structured_outputs": self._structured_outputs()}
        for name in _CONSTRAINTS:
            del options[name]
        options["stop_token_ids"] = options.pop("stop_token_id")
        return SamplingParams(**{**defaults, **{k: v for k, v in options.items() if v is not None}})

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        from opweave_engine import StructuredOutputsParams

        names = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if not names:
            return None
        if len(names) > 1:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in names)
            raise CliError(f"{options} are mutually exclusive; give one of them.")
        return StructuredOutputsParams(
            json=_text_or_file("--json-schema", self.json_schema, "{"),
            regex=self.regex,
            choice=self.choice,
            grammar=_text_or_file("--grammar", self.grammar, "\n", "::=", "start:"),
        )


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """Options for loading and placing a model.

    Parameters
    ----------
    dtype
        auto (the checkpoint's), float32, bfloat16 or float16.
    load_format
        auto reads the weights; dummy uses random weights.
    model_impl
        Implementation of the model: opweave, transformers, or auto, which prefers opweave's.
    tensor_parallel_size
        Number of tensor-parallel ranks.
    cpu_threads
        Number of CPU threads per rank. The default is OMP_NUM_THREADS, else torch's choice.
    generation_config
        Source of sampling defaults: auto (the checkpoint's generation_config.json), none, or
        another directory with a generation_config.json.
    """

    dtype: str = "auto"
    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"
    tensor_parallel_size: int | None = None
    cpu_threads: int | None = None
    generation_config: str = "auto"

    def defaults(self, model: Path, **fallbacks: object) -> dict[str, object]:
        """Return the sampling defaults of the checkpoint *model*, else *fallbacks*.

        Raises:
            CheckpointError: the generation_config.json is malformed or missing.
        """
        from opweave_engine import Checkpoint
        from opweave_engine.load.checkpoint import sampling_defaults

        return {**fallbacks, **sampling_defaults(Checkpoint(model), self.generation_config)}

    def config(self, parallel: Mapping[str, object] = {}, **others: Any) -> EngineConfig:
        """Return the configuration.

        Args:
            parallel: other fields of its ``parallel``; None: not given.
            others: other fields.

        Raises:
            SettingError: a value is out of range.
        """
        parallel = {**parallel, "tensor_parallel_size": self.tensor_parallel_size}
        return EngineConfig(
            dtype=self.dtype, load_format=self.load_format, model_impl=self.model_impl,
            cpu_threads=self.cpu_threads, generation_config=self.generation_config,
            parallel=configured(ParallelConfig, **parallel), **others,
        )  # fmt: skip
