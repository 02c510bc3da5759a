"""The options of the commands that run a model in the terminal: which one, where, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from opweave.cli.flag import Flag
from opweave.cli.structured import structured_outputs
from opweave.config import EngineConfig, ParallelConfig

if TYPE_CHECKING:
    from opweave.engine import SamplingParams

T = TypeVar("T")


def given(kind: type[T], **values: object) -> T:
    """Return a configuration of the values that were given; a platform may choose the others."""
    return kind(**{name: value for name, value in values.items() if value is not None})


@Parameter(name="*")
@dataclass(frozen=True)
class SamplingOptions:
    """How to choose tokens, except for options whose default differs between commands.

    The checkpoint's generation_config.json sets the defaults of top_k, top_p, min_p and
    repetition_penalty, if it has them.

    Parameters
    ----------
    top_k
        Choose among this many likeliest tokens; 0 is all. The default is the checkpoint's, else 0.
    top_p
        Choose among the likeliest tokens that add up to this probability. The default is the
        checkpoint's, else 1.
    min_p
        Choose among tokens at least this probable, relative to the likeliest one. The default is
        the checkpoint's, else 0.
    presence_penalty
        From -2 to 2: taken off the score of every token that the answer has.
    frequency_penalty
        From -2 to 2: taken off as often as the answer has the token.
    repetition_penalty
        Above 1, tokens that were there before become less likely. The default is the checkpoint's,
        else 1.
    seed
        Makes sampling repeatable.
    stop
        End an answer at this text; give it several times for more than one.
    stop_token_id
        End an answer at this token; give it several times for more than one.
    min_tokens
        Let nothing end an answer before it has so many tokens.
    ignore_eos
        Go on after an end-of-text token.
    json_schema
        Answer with JSON that satisfies this schema: a file, or the schema itself.
    regex
        Answer with a text that matches this regular expression.
    choice
        Answer with this text; give it several times for a choice.
    grammar
        Answer with a text of this grammar, in Lark or GBNF notation: a file, or the grammar itself.
    skip_special_tokens
        Leave special tokens out of the text.
    spaces_between_special_tokens
        Where they are not left out, keep the space that some tokenizers write between two of them.
    include_stop_str_in_output
        Show the stop text that ended an answer.
    allowed_token_ids
        Choose among these tokens only; give it several times for more than one.
    bad_words
        Never write this text; give it several times for more than one.
    truncate_prompt_tokens
        Keep only the last tokens of a longer prompt, as many as this; -1: as many as there is room
        for.
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
        """Return them as parameters.

        Args:
            defaults: for options that were not given.
            others: options that are not in this class; None: not given.

        Raises:
            SamplingParamsError: a value is out of range.
            CliError: several options say what form the answer must have, or a file cannot be read.
        """
        from opweave.engine import SamplingParams

        options = {**vars(self), **others}
        form = (options.pop(name) for name in ("json_schema", "regex", "choice", "grammar"))
        options["structured_outputs"] = structured_outputs(*form)
        options["stop_token_ids"] = options.pop("stop_token_id")
        found = {**defaults, **{k: v for k, v in options.items() if v is not None}}
        return SamplingParams(**found)


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """How to load a model, and where it runs.

    Parameters
    ----------
    dtype
        auto (the checkpoint's), float32, bfloat16 or float16.
    load_format
        auto reads the weights; dummy makes random ones up.
    tensor_parallel_size
        Over how many devices the model is divided.
    cpu_threads
        How many threads kernels on the CPU use, in each rank. The default is OMP_NUM_THREADS, else
        what torch chooses.
    generation_config
        Where sampling defaults come from: auto is the checkpoint's generation_config.json, none
        disables them, anything else is a directory with another such file.
    """

    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    tensor_parallel_size: int | None = None
    cpu_threads: int | None = None
    generation_config: str = "auto"

    def defaults(self, model: Path, **fallbacks: object) -> dict[str, object]:
        """Return the sampling defaults of the checkpoint *model*, and *fallbacks* for others.

        Raises:
            CheckpointError: the checkpoint's file of defaults is damaged or missing.
        """
        from opweave.engine import Checkpoint
        from opweave.engine.loading.generation_config import sampling_defaults

        return {**fallbacks, **sampling_defaults(Checkpoint(model), self.generation_config)}

    def config(self) -> EngineConfig:
        """Return them as a configuration, after plugins and settings were applied.

        Raises:
            SettingError: a value is out of range.
        """
        return EngineConfig(
            dtype=self.dtype,
            load_format=self.load_format,
            cpu_threads=self.cpu_threads,
            generation_config=self.generation_config,
            parallel=given(ParallelConfig, tensor_parallel_size=self.tensor_parallel_size),
        )
