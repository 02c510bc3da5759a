"""``opweave bench``: compare kernels (``bench OP``); the engine adds ``bench serve``."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.markup import escape
from rich.table import Table

from opweave.cli import output
from opweave.cli.companions import add_commands
from opweave.cli.options import (
    Flag,
    ImportOption,
    RoundsOption,
    SeedOption,
    SelectionOptions,
    import_modules,
)
from opweave.cli.output import CliError, PlainTable, facts, out
from opweave.cli.record import TokensOption, shown_time

if TYPE_CHECKING:
    from opweave.ir import IrOp
    from opweave.tuning import Effort, Measurement
    from opweave.tuning.cases import Sized


# ``opweave bench OP``: compare the implementations of an op on this machine.


_OPTIONS = SelectionOptions()
DTYPES = ("float32", "bfloat16", "float16", "float64")
Results = list[tuple["Sized", str, list["Measurement"]]]


def bench_op(
    op: str,
    /,
    *,
    tokens: TokensOption = None,
    shape: Annotated[list[str] | None, Parameter(negative=())] = None,
    dtype: str | None = None,
    trace: Path | None = None,
    plot: str | None = None,
    seed: SeedOption = 0,
    rounds: RoundsOption = 15,
    options: SelectionOptions = _OPTIONS,
    import_: ImportOption = None,
    json: Flag = False,
) -> int:
    """Time every implementation of an op, after comparing its result with the definition.

    The table has the time of the kernel alone, and that of a call through the op. The fastest comes
    first, unless other processes keep this machine busy. Exits with 1 if a result is wrong.

    Parameters
    ----------
    op
        The op, such as rms_norm; opweave ops lists them.
    tokens
        Numbers of tokens; 1 16 256 by default.
    shape
        An option of the op's input generator, such as hidden_size=4096; repeatable. The default
        sizes are those of a model of 8B parameters.
    dtype
        float32, bfloat16, float16 or float64; bfloat16 by default.
    trace
        Measure the calls in this trace file of opweave record instead.
    plot
        Write a chart of the times over tokens to this SVG file.
    seed
        Seed of the arguments.
    json
        Print JSON.
    """
    from opweave.ir import current_registry
    from opweave.tuning import Effort
    from opweave.tuning.timing import busy, disturbance

    output.check_writable("--plot", plot)
    if plot is not None and not plot.endswith(".svg"):
        raise CliError(f"--plot {plot!r} should end in .svg, the only format of charts.")
    import_modules(import_)
    options.apply()
    chosen = current_registry().op(op.replace("-", "_"))
    cases = _cases(chosen, tokens, shape, dtype, trace, seed)
    busy_reason = busy()
    results, limit = _measured(cases, Effort(rounds=rounds))
    busy_reason = busy_reason or disturbance()
    if json:
        output.print_json({**_as_data(chosen, results, limit), "busy": busy_reason})
    else:
        out.print(_table(results, limit, is_ranked=busy_reason is None))
        if busy_reason is not None:
            out.print(f"{busy_reason}: not ranked", markup=False)
    if plot is not None:
        output.write("--plot", plot, _chart(chosen, results))
    measurements = [m for *_, of_case in results for m in of_case]
    return 1 if any(m.status == "failed" for m in measurements) else 0


def _cases(
    op: IrOp,
    tokens: list[int] | None,
    shape: list[str] | None,
    dtype: str | None,
    trace: Path | None,
    seed: int,
) -> list[Sized]:
    import torch

    from opweave.conformance.find import with_inputs
    from opweave.conformance.subject import Subject
    from opweave.tuning import Trace
    from opweave.tuning.cases import TOKENS, generated, traced

    if trace is not None:
        if tokens or shape or dtype:
            raise CliError("--trace contains the sizes. Leave out --tokens, --shape and --dtype.")
        return list(traced(op, Trace.load(trace), seed))
    if dtype is not None and dtype not in DTYPES:
        raise CliError(f"--dtype {dtype!r} should be one of {', '.join(DTYPES)}.")
    for count in tokens or ():
        if count < 1:
            raise CliError(f"--tokens {count} should be at least 1.")
    [subject] = with_inputs([Subject(op, "native")], shape or [], "--shape")
    kind = None if dtype is None else getattr(torch, dtype)
    options = dict(subject.options)
    return list(generated(op, tuple(tokens or TOKENS), options, kind, seed))


def _measured(cases: list[Sized], effort: Effort) -> tuple[Results, float]:
    """Return the measurements of each case with the default provider, and the copy bandwidth."""
    from opweave.tuning.measure import contest, default_provider
    from opweave.tuning.timing import copy_speed

    results: Results = []
    with output.progress_bar("measuring") as progress:
        limit = copy_speed()
        for done, sized in enumerate(cases):
            progress(done, len(cases), f"{sized.tokens} tokens")
            default = default_provider(sized.case)
            measured = contest(sized.case, effort=effort, default=default, with_calls=True)
            results.append((sized, default, measured))
    return results, limit


def _table(results: Results, limit: float, *, is_ranked: bool) -> Table:
    table = PlainTable("tokens", "provider", "µs", "call µs", "GB/s", "of limit", "error", "call")
    for column in (0, 2, 3, 4, 5, 6):
        table.columns[column].justify = "right"
    for sized, default, measurements in results:
        for m in sorted(measurements, key=_microseconds) if is_ranked else measurements:
            speed = m.bytes_per_second
            name = f"{m.provider} (default)" if m.provider == default else m.provider
            reason = f"[red]{m.status}[/]: {escape(m.reason)}"
            table.add_row(
                str(sized.tokens), escape(name), shown_time(m.time), shown_time(m.call_time),
                "-" if speed is None else f"{speed / 1e9:.1f}",
                "-" if speed is None else f"{speed / limit:.0%}",
                "-" if m.error is None else f"{m.error:.1e}",
                reason if m.reason else escape(_call(sized)),
            )  # fmt: skip
    return table


def _microseconds(measurement: Measurement) -> float:
    return measurement.time.microseconds if measurement.time else math.inf


def _call(sized: Sized) -> str:
    return str(sized.case).rpartition(" [")[0]


def _as_data(op: IrOp, results: Results, limit: float) -> dict[str, Any]:
    rows = [
        {
            "tokens": sized.tokens, "call": _call(sized), "provider": m.provider,
            "default": m.provider == default, "status": m.status, "reason": m.reason or None,
            "time": asdict(m.time) if m.time else None,
            "call_time": asdict(m.call_time) if m.call_time else None,
            "bytes": m.bytes, "error": m.error,
            "gb_per_second": speed / 1e9 if (speed := m.bytes_per_second) else None,
            "limit_share": speed / limit if speed else None,
        }
        for sized, default, measurements in results
        for m in measurements
    ]  # fmt: skip
    return {"op": op.name, "machine": facts(), "copy_gb_per_second": limit / 1e9, "rows": rows}


def _chart(op: IrOp, results: Results) -> str:
    from opweave.tuning.plot import draw

    lines: dict[str, list[tuple[int, float]]] = {}
    for sized, _, measurements in results:
        for m in measurements:
            if m.time is not None:
                lines.setdefault(m.provider, []).append((sized.tokens, m.time.microseconds))
    here = facts()
    caption = f"{here['device']}, {here['threads']} threads, torch {here['torch']}"
    return draw(lines, _call(results[-1][0]), caption)


# The command group ``bench``, to which companion packages add commands.


bench = App(name="bench", help="Compare the kernels of an op, or load-test a running server.")
bench.help_format = "plaintext"
bench.default(bench_op)
add_commands(bench, "bench")
