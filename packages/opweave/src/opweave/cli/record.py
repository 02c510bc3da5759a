"""``opweave record`` and ``opweave replay``: the op calls of a model, without the model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from opweave.cli.companions import model_runner
from opweave.cli.explain import PROMPT
from opweave.cli.options import (
    Flag,
    ImportOption,
    RoundsOption,
    SeedOption,
    SelectionOptions,
    check_utf8,
    import_modules,
)
from opweave.cli.output import (
    CliError,
    PlainTable,
    check_writable,
    err,
    out,
    print_json,
    progress_bar,
)
from opweave.config.engine import LoadFormat

if TYPE_CHECKING:
    from opweave.tuning import Effort, Replay, Time, Trace

_OPTIONS = SelectionOptions()
TokensOption = Annotated[list[int] | None, Parameter(negative=(), consume_multiple=True)]


def record(
    model: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    prompt: str = PROMPT,
    tokens: TokensOption = None,
    max_tokens: int = 2,
    data: Flag = False,
    dtype: str = "auto",
    load_format: LoadFormat = "auto",
    options: SelectionOptions = _OPTIONS,
    import_: ImportOption = None,
) -> None:
    """Record the op calls of a model run to a file.

    The file lists each distinct call with dtypes, shapes, strides and other values; opweave replay,
    bench and tune read it.

    Parameters
    ----------
    model
        A directory with config.json, safetensors and tokenizer.json; or a GGUF file.
    output
        The trace file to write.
    prompt
        The text to run the model on.
    tokens
        Prompt lengths to run, such as 1 16 128; the prompt is repeated or cut to each. By default,
        the prompt is unchanged.
    max_tokens
        Number of tokens to generate; each one after the first is a decode step.
    data
        Also store the tensors of each distinct call, next to the trace.
    dtype
        auto (the checkpoint's), float32, bfloat16 or float16.
    load_format
        auto reads the weights; dummy uses random weights.
    """
    check_utf8(prompt)
    check_writable("--output", str(output))
    if data and output.suffix == ".safetensors":
        raise CliError(
            f"--output {str(output)!r} is where --data writes the tensors; give a name with "
            "another suffix, such as .jsonl."
        )
    import_modules(import_)
    options.apply()
    trace = record_model(
        model, prompt, tokens, max_tokens, data=data, dtype=dtype, load_format=load_format
    )
    trace.save(output)
    calls = sum(call.count for call in trace.calls)
    ops = len({call.op for call in trace.calls})
    out.print(f"{calls} calls of {ops} ops, {len(trace.calls)} of them distinct: {output}")
    for op, reason in trace.skipped.items():
        err.print(f"{op} is not in the trace: {reason}", markup=False)


def record_model(
    model: Path,
    prompt: str,
    lengths: list[int] | None,
    max_tokens: int,
    *,
    data: bool = False,
    dtype: str = "auto",
    load_format: LoadFormat = "auto",
) -> Trace:
    """Run a model in eager mode on prompts of several lengths, and return the trace.

    Raises:
        CliError: a length is not positive, or the prompt is empty.
    """
    from opweave.tuning import record_calls

    runner = model_runner("record")
    for name, least in [("--max-tokens", max_tokens), *(("--tokens", n) for n in lengths or ())]:
        if least < 1:
            raise CliError(f"{name} {least} should be at least 1.")
    ids = runner.tokens(model, prompt)
    if not ids:
        raise CliError(f"--prompt {prompt!r} has no tokens; give a text.")
    prompts = [_of_length(ids, length) for length in lengths or [len(ids)]]
    # The cache holds one such sequence only: tensors of a trace should not be larger than needed.
    longest = max(map(len, prompts)) + max_tokens
    with progress_bar("loading") as loading:
        generate = runner.generator(
            model, dtype=dtype, load_format=load_format, max_length=longest, progress=loading
        )
    with record_calls(data=data) as recorder, progress_bar("recording") as running:
        for done, each in enumerate(prompts):
            running(done, len(prompts))
            generate(each, max_tokens, None)
    return recorder.trace


def _of_length(ids: list[int], length: int) -> list[int]:
    return (ids * (length // len(ids) + 1))[:length]


def replay(
    trace: Path,
    /,
    *,
    provider: str | None = None,
    op: Annotated[list[str] | None, Parameter(negative=())] = None,
    seed: SeedOption = 0,
    rounds: RoundsOption = 15,
    options: SelectionOptions = _OPTIONS,
    import_: ImportOption = None,
    json: Flag = False,
) -> int:
    """Run the calls of a trace: compare results with the definition, and time them.

    Exits with 1 if a result is wrong, or the provider supports none of the calls.

    Parameters
    ----------
    trace
        A trace file of opweave record.
    provider
        Run the implementations of this provider; by default, the one that each call selects.
    op
        Replay calls of this op only; repeatable.
    seed
        Seed of the random tensors.
    json
        Print JSON.
    """
    from opweave.tuning import Effort, Trace

    import_modules(import_)
    options.apply()
    found = Trace.load(trace)
    replays = _replays(found, provider, op or [], Effort(rounds=rounds), seed)
    if json:
        print_json({"trace": str(trace), "replays": [_as_data(each) for each in replays]})
    else:
        out.print(_table(replays))
        for each in replays:
            if each.status == "failed":
                out.print(f"[bold red]✗[/] {escape(f'{each.call.op}: {each.reason}')}")
    statuses = [each.status for each in replays]
    return 1 if "failed" in statuses or "passed" not in statuses else 0


def _replays(
    trace: Trace, provider: str | None, ops: list[str], effort: Effort, seed: int
) -> list[Replay]:
    from opweave.ir import current_registry
    from opweave.ir.errors import did_you_mean
    from opweave.tuning import replay as replay_call

    names = [name.replace("-", "_") for name in ops]
    recorded = {call.op for call in trace.calls}
    for name in names:
        if name not in recorded:
            raise CliError(f"--op {name!r} is not in the trace. {did_you_mean(name, recorded)}")
    chosen = [call for call in trace.calls if not names or call.op in names]
    known = {p for call in chosen for p in trace.op(call).impls}
    if provider is not None and provider not in known:
        raise CliError(
            f"--provider {provider!r} has no implementation of an op in the trace. "
            f"{did_you_mean(provider, known)} --import MODULE imports the module that registers it."
        )
    current_registry().check_settings()
    replays = []
    with progress_bar("replaying") as progress:
        for done, call in enumerate(chosen):
            progress(done, len(chosen), call.op)
            replays.append(replay_call(trace, call, provider, effort=effort, seed=seed))
    return replays


def _as_data(each: Replay) -> dict[str, Any]:
    return {
        "op": each.call.op, "tokens": each.call.tokens, "calls": each.call.count,
        "call": each.call.label, "provider": each.provider, "default": each.default,
        "status": each.status, "reason": each.reason or None,
        "time": asdict(each.time) if each.time else None,
        "default_time": asdict(each.default_time) if each.default_time else None,
    }  # fmt: skip


def _table(replays: list[Replay]) -> Table:
    table = PlainTable("op", "tokens", "calls", "provider", "result", "µs", "default", "µs", "call")
    for column in (1, 2, 5, 7):
        table.columns[column].justify = "right"
    marks = {"passed": "[green]passed[/]", "failed": "[bold red]failed[/]"}
    for each in replays:
        call = each.call
        rejected = f"rejected: {escape(each.reason)}"
        table.add_row(
            call.op, str(call.tokens), str(call.count), escape(each.provider),
            marks.get(each.status, rejected), shown_time(each.time), escape(each.default),
            shown_time(each.default_time), escape(call.label),
        )  # fmt: skip
    return table


def shown_time(time: Time | None) -> str:
    """Return a time in µs, with its noise."""
    return "-" if time is None else f"{time.microseconds:.1f} ±{time.noise:.0%}"
