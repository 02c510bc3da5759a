"""``opweave tune``: measure which implementation is the fastest for the calls of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.markup import escape

from opweave.cli.explain import PROMPT
from opweave.cli.options import (
    Flag,
    ImportOption,
    PluginOption,
    RoundsOption,
    SeedOption,
    apply_plugins,
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
from opweave.cli.record import TokensOption, record_model, shown_time
from opweave.config.engine import LoadFormat

if TYPE_CHECKING:
    from opweave.tuning import Machine, Trace
    from opweave.tuning.measure import Cell
    from opweave.tuning.tuning_file import Tuned

LENGTHS = [16, 128]


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
    that crashes is excluded. If the file exists, only missing measurements are made.

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
        lengths = tokens or LENGTHS
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
        print_json({"cells": cells, "left": tuned.left, "problems": tuned.problems})
    else:
        _show(tuned, output)


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
        print_json(
            [
                {"op": c.op, "tokens": c.tokens, "calls": c.count, "call": c.label, "providers": p}
                for c, p in plan
            ]
        )
        return
    table = PlainTable("op", "tokens", "calls", "providers", "call")
    for call, providers in plan:
        names = escape(", ".join(providers))
        table.add_row(call.op, str(call.tokens), str(call.count), names, escape(call.label))
    out.print(table)
    out.print(f"{len(plan)} to measure, {len(done)} in {output}", markup=False)


def _show(tuned: Tuned, output: Path) -> None:
    faster = [cell for cell in tuned.cells if cell.best != cell.default]
    if faster:
        table = PlainTable("op", "tokens", "best", "µs", "default", "µs", "call")
        for cell in faster:
            table.add_row(
                cell.op, str(cell.tokens), escape(cell.best), shown_time(cell.time(cell.best)),
                escape(cell.default), shown_time(cell.time(cell.default)), escape(cell.family),
            )  # fmt: skip
        out.print(table)
    out.print(
        f"{len(tuned.cells)} measured, the default is not the fastest in {len(faster)}: {output}",
        markup=False,
    )
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
