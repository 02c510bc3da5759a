"""Arguments to measure an op on: from its input generator, or from a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opweave import platforms
from opweave.conformance.inputs import arguments, options_of
from opweave.conformance.subject import Case, Subject
from opweave.errors import described
from opweave.ir import IrOp
from opweave.tuning.trace import Trace, TuningError

TOKENS = (1, 16, 256)
# Sizes of a model of 8B parameters, instead of the small ones that generators have for tests.
SIZES = {
    "hidden_size": 4096, "output_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_size": 128,
    "rotary_size": 128, "value_size": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Sized:
    """A case with its number of tokens."""

    case: Case
    tokens: int


def generated(
    op: IrOp,
    tokens: Sequence[int] = TOKENS,
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Iterator[Sized]:
    """Yield a case for each number of tokens.

    Args:
        op: the op.
        tokens: the numbers of tokens.
        options: options of the op's input generator; by default :data:`SIZES`, as far as the
            generator takes them and they fit each other.
        dtype: the dtype of the activations; by default bfloat16 where the generator has a
            floating-point default.
        seed: the seed of the arguments.

    Raises:
        TuningError: the generator or the op does not accept the sizes, or the op has no generator.
    """
    if not op.has_input_generator:
        raise TuningError(f"{op.name} has no input generator: measure it with a trace.")
    subject = Subject(op, "native", platforms.current_platform.device_type)
    defaults = options_of(subject)
    if "num_tokens" not in defaults:
        raise TuningError(f"--tokens: the input generator of {op.name} has no such option.")
    if "dtype" not in defaults and dtype is not None:
        raise TuningError(f"--dtype: the input generator of {op.name} has no such option.")
    default = defaults.get("dtype")
    if dtype is None and isinstance(default, torch.dtype) and default.is_floating_point:
        dtype = torch.bfloat16
    fixed = {} if dtype is None else {"dtype": dtype}
    usual = {name: size for name, size in SIZES.items() if name in defaults}
    choices = [{**usual, **(options or {})}, dict(options or {})]
    for count in tokens:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield Sized(_first(subject, choices, {**fixed, "num_tokens": count}), count)


def for_subject(subject: Subject, tokens: int = 256) -> Case | None:
    """Return arguments of a usual size that an implementation accepts, if there are any."""
    for dtype in (None, torch.float32):
        try:
            [sized] = generated(subject.op, [tokens], dict(subject.options), dtype)
        except TuningError:
            continue
        if subject.accepts(sized.case.values):
            return sized.case
    return None


def traced(op: IrOp, trace: Trace, seed: int = 0) -> Iterator[Sized]:
    """Yield a case for each distinct call of *op* in a trace.

    Raises:
        TuningError: the trace has no call of *op*, or native does not accept one.
    """
    labels = set()
    for call in trace.calls:
        if call.op == op.name and call.label not in labels:
            labels.add(call.label)
            case = Case(trace.op(call), call.label, trace.values(call, seed))
            if case.refusal is not None:
                raise TuningError(f"native raises {described(case.refusal, 1)}: {case}")
            yield Sized(case, call.tokens)
    if not labels:
        recorded = ", ".join(dict.fromkeys(call.op for call in trace.calls)) or "nothing"
        raise TuningError(f"the trace has no call of {op.name}; it has {recorded}.")


def _first(subject: Subject, choices: Sequence[dict[str, Any]], fixed: dict[str, Any]) -> Case:
    """Return the case of the first options that fit each other."""
    problem = ""
    for options in choices:
        try:
            case = Case(subject.op, _label(options), arguments(subject, **options, **fixed))
        except Exception as error:
            problem = described(error, 1)
            continue
        if case.refusal is None:
            return case
        problem = described(case.refusal, 1)
    shown = ", ".join(f"{name}={value}" for name, value in {**choices[-1], **fixed}.items())
    raise TuningError(f"{subject.op.name} does not accept {shown}: {problem}.")


def _label(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
