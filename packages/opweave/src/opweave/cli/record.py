"""``opweave record``, ``replay`` and ``tune``: the op calls of a model, without the model."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import cycle, islice
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
    PluginOption,
    RoundsOption,
    SeedOption,
    SelectionOptions,
    apply_plugins,
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
    from opweave.conformance.kernel_process import Replayer
    from opweave.tuning import Cell, Effort, Machine, Replay, Time, Trace, Tuned

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
        A checkpoint's directory, a GGUF file, or the id of a repository on the Hugging Face hub.
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
    prompts = [list(islice(cycle(ids), length)) for length in lengths or [len(ids)]]
    # The cache holds one such sequence only: tensors of a trace should not be larger than needed.
    longest = max(map(len, prompts)) + max_tokens
    with progress_bar("loading") as loading:
        generate = runner.generator(
            model, dtype=dtype, load_format=load_format, max_length=longest, progress=loading
        )
    with record_calls(data=data) as recorder, progress_bar("recording") as running:
        for done, tokens in enumerate(prompts):
            running(done, len(prompts))
            generate(tokens, max_tokens, None)
    return recorder.trace


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

    Right results are also compared in a process that only runs the implementation.

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
    from opweave.conformance.kernel_process import Replayer
    from opweave.tuning import Effort, Trace

    import_modules(import_)
    options.apply()
    with Replayer(import_ or ()) as replayer:
        chosen = Trace.load(trace), provider, op or []
        replays = _replays(*chosen, Effort(rounds=rounds), seed, replayer)
    if json:
        print_json({"trace": str(trace), "replays": list(map(_as_data, replays))})
    else:
        out.print(_table(replays))
        for r in replays:
            if r.status == "failed":
                out.print(f"[bold red]✗[/] {escape(f'{r.call.op}: {r.reason}')}")
    statuses = [r.status for r in replays]
    return 1 if "failed" in statuses or "passed" not in statuses else 0


def _replays(
    trace: Trace,
    provider: str | None,
    ops: list[str],
    effort: Effort,
    seed: int,
    replayer: Replayer,
) -> list[Replay]:
    from opweave.conformance import Case
    from opweave.ir import current_registry
    from opweave.ir.errors import did_you_mean
    from opweave.tuning import replay as replay_call

    names = [name.replace("-", "_") for name in ops]
    recorded = {call.op for call in trace.calls}
    for name in names:
        if name not in recorded:
            raise CliError(f"--op {name!r} is not in the trace. {did_you_mean(name, recorded)}")
    chosen = [call for call in trace.calls if not names or call.op in names]
    providers = {p for call in chosen for p in trace.op(call).impls}
    if provider is not None and provider not in providers:
        raise CliError(
            f"--provider {provider!r} has no implementation of an op in the trace. "
            f"{did_you_mean(provider, providers)} --import MODULE imports the module that "
            "registers it."
        )
    current_registry().check_settings()
    replays = []
    with progress_bar("replaying") as progress:
        for done, call in enumerate(chosen):
            progress(done, len(chosen), call.op)
            r = replay_call(trace, call, provider, effort=effort, seed=seed)
            if r.status == "passed":
                case = Case(trace.op(call), call.label, trace.values(call, seed))
                problem = replayer.problem(case, r.provider)
                r = replace(r, status="failed", reason=problem, time=None) if problem else r
            replays.append(r)
    return replays


def _as_data(r: Replay) -> dict[str, Any]:
    return {
        "op": r.call.op, "tokens": r.call.tokens, "calls": r.call.count, "call": r.call.label,
        "provider": r.provider, "default": r.default, "status": r.status,
        "reason": r.reason or None, "time": asdict(r.time) if r.time else None,
        "default_time": asdict(r.default_time) if r.default_time else None,
    }  # fmt: skip


def _table(replays: list[Replay]) -> Table:
    table = PlainTable("op", "tokens", "calls", "provider", "result", "µs", "default", "µs", "call")
    for column in (1, 2, 5, 7):
        table.columns[column].justify = "right"
    marks = {"passed": "[green]passed[/]", "failed": "[bold red]failed[/]"}
    for r in replays:
        call, rejected = r.call, f"rejected: {escape(r.reason)}"
        table.add_row(
            call.op, str(call.tokens), str(call.count), escape(r.provider),
            marks.get(r.status, rejected), shown_time(r.time), escape(r.default),
            shown_time(r.default_time), escape(call.label),
        )  # fmt: skip
    return table


def shown_time(time: Time | None) -> str:
    """Return a time in µs, with its noise."""
    return "-" if time is None else f"{time.microseconds:.1f} ±{time.noise:.0%}"


# ``opweave tune``: measure which implementation is the fastest for the calls of a model.


_TUNED_LENGTHS = [16, 128]  # of prompts, by default


def tune(
    source: Path | None = None,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    merge: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)] = None,
    budget: float | None = None,
    dry_run: Flag = False,
    tokens: TokensOption = None,
    dtype: str = "auto",
    load_format: LoadFormat = "auto",
    timeout: float = 120.0,
    seed: SeedOption = 0,
    rounds: RoundsOption = 15,
    plugin: PluginOption = None,
    import_: ImportOption = None,
    json: Flag = False,
) -> None:
    """Measure the implementations of every op that a model calls, and write a tuning file.

    Results are checked against the definition first. Each implementation runs in a subprocess; one
    that crashes is excluded. If the file exists, only missing and outdated measurements are made.

    Parameters
    ----------
    source
        A model directory, or a trace file of opweave record.
    output
        The tuning file.
    merge
        Merge these tuning files into the output instead of measuring; the last one wins.
    budget
        Start no new measurement after this many seconds; run the command again to continue.
    dry_run
        Show what would be measured.
    tokens
        Prompt lengths, for a model; 16 128 by default. Decode steps are always included.
    dtype
        The dtype of a model: auto (the checkpoint's), float32, bfloat16 or float16.
    load_format
        auto reads the weights of a model; dummy uses random weights.
    timeout
        Timeout in seconds for one step of an implementation, which then counts as crashed.
    seed
        Seed of the random tensors.
    json
        Print JSON.
    """
    check_writable("--output", str(output))
    if merge:
        if source is not None:
            raise CliError(f"--merge combines tuning files. Leave out {str(source)!r}.")
        _merge(merge, output)
        return
    if source is None:
        raise CliError("Give a model directory or a trace file, or --merge FILE FILE.")
    for name, value in (("--budget", budget), ("--timeout", timeout)):
        if value is not None and not value > 0:
            raise CliError(f"{name} {value:g} should be a positive number of seconds.")
    from opweave.tuning import Effort, Machine, Task, Trace
    from opweave.tuning import tune as measure

    import_modules(import_)
    apply_plugins(plugin)
    machine = Machine.here()  # before an engine changes the number of threads
    if source.is_dir():
        lengths = tokens or _TUNED_LENGTHS
        trace = record_model(source, PROMPT, lengths, 2, dtype=dtype, load_format=load_format)
    elif tokens:
        raise CliError("--tokens is for a model; a trace contains the sizes.")
    else:
        trace = Trace.load(source)
    if dry_run:
        _show_plan(trace, output, machine, json=json)
        return
    task = Task(tuple(import_ or ()), Effort(rounds=rounds), seed)
    with progress_bar("measuring") as progress:
        tuned = measure(
            trace, output, task, machine=machine, budget=budget, timeout=timeout, progress=progress
        )
    if json:
        cells = [cell.to_dict() for cell in tuned.cells]
        rest = {"left": tuned.left, "stale": tuned.stale, "problems": tuned.problems}
        print_json({"cells": cells, **rest})
    else:
        _show_tuned(tuned, output)


def _merge(files: list[Path], output: Path) -> None:
    from opweave.tuning import TuningFile
    from opweave.tuning.tuning_file import merge

    merged = merge(TuningFile.load(file) for file in files)
    merged.save(output)
    cells = sum(map(len, merged.machines.values()))
    out.print(f"{cells} measurements of {len(merged.machines)} machines: {output}", markup=False)


def _show_plan(trace: Trace, output: Path, machine: Machine, *, json: bool) -> None:
    from opweave.tuning import TuningFile
    from opweave.tuning.measure import cells_to_measure

    file = TuningFile.load(output) if output.exists() else TuningFile()
    done = file.machines.get(machine, {})
    calls = cells_to_measure(trace, done)
    plan = [(call, trace.op(call).supported_providers()) for call in calls]
    if json:
        rows = [
            {"op": c.op, "tokens": c.tokens, "calls": c.count, "call": c.label, "providers": p}
            for c, p in plan
        ]
        print_json(rows)
        return
    table = PlainTable("op", "tokens", "calls", "providers", "call")
    for call, providers in plan:
        names = escape(", ".join(providers))
        table.add_row(call.op, str(call.tokens), str(call.count), names, escape(call.label))
    out.print(table)
    out.print(f"{len(plan)} to measure, {len(done)} in {output}", markup=False)


def _show_tuned(tuned: Tuned, output: Path) -> None:
    faster = [cell for cell in tuned.cells if cell.best != cell.default]
    if faster:
        table = PlainTable("op", "tokens", "best", "µs", "default", "µs", "call")
        for cell in faster:
            table.add_row(
                cell.op, str(cell.tokens), escape(cell.best), shown_time(cell.time(cell.best)),
                escape(cell.default), shown_time(cell.time(cell.default)), escape(cell.family),
            )  # fmt: skip
        out.print(table)
    if tuned.stale:
        out.print(f"changed since they were measured: {', '.join(tuned.stale)}", markup=False)
    out.print(
        f"{len(tuned.cells)} measured, the default is not the fastest in {len(faster)}: {output}",
        markup=False,
    )
    busy = [cell.busy for cell in tuned.cells if cell.busy]
    if busy:
        advice = "Run the command again when it is idle."
        out.print(f"{busy[-1]}: nothing is chosen in {len(busy)}. {advice}", markup=False)
    for line in dict.fromkeys(line for cell in tuned.cells for line in _excluded(cell)):
        out.print(f"[bold red]✗[/] {escape(line)}")
    for call, reason in tuned.problems.items():
        err.print(f"not measured: {call}: {reason}", markup=False)
    if tuned.left:
        out.print(f"{tuned.left} left when the budget ended. Run the command again to continue.")


def _excluded(cell: Cell) -> list[str]:
    return [
        f"{cell.op}:{m.provider} {m.status} and is excluded: {m.reason}"
        for m in cell.results
        if m.status in ("failed", "crashed")
    ]
