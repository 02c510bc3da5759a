"""The options of the commands that run a model in the terminal: which one, where, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from opweave.cli.flag import Flag
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
    """How to choose tokens, beside what each command has a default of its own for.

    Parameters
    ----------
    top_k
        Choose among this many likeliest tokens; 0 is all.
    top_p
        Choose among the likeliest tokens that add up to this probability.
    min_p
        Choose among tokens at least this probable, relative to the likeliest one.
    presence_penalty
        From -2 to 2: taken off the score of every token that the answer has.
    frequency_penalty
        From -2 to 2: taken off as often as the answer has the token.
    repetition_penalty
        Above 1, tokens that were there before become less likely.
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
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[list[str] | None, Parameter(negative=())] = None
    stop_token_id: Annotated[list[int] | None, Parameter(negative=())] = None
    min_tokens: int = 0
    ignore_eos: Flag = False

    def params(self, *, max_tokens: int | None, temperature: float) -> SamplingParams:
        """Return them as parameters.

        Raises:
            SamplingParamsError: a value is out of range.
        """
        from opweave.engine import SamplingParams

        given = vars(self) | {"stop": self.stop or [], "stop_token_ids": self.stop_token_id or []}
        del given["stop_token_id"]
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, **given)


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
    """

    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    tensor_parallel_size: int | None = None
    cpu_threads: int | None = None

    def config(self) -> EngineConfig:
        """Return them as a configuration, after plugins and settings were applied.

        Raises:
            SettingError: a value is out of range.
        """
        return EngineConfig(
            dtype=self.dtype,
            load_format=self.load_format,
            cpu_threads=self.cpu_threads,
            parallel=given(ParallelConfig, tensor_parallel_size=self.tensor_parallel_size),
        )
