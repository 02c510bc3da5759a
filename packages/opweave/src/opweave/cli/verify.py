"""``opweave verify``: check implementations against their op, and issue a certificate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from opweave.cli import output
from opweave.cli.options import (
    Flag,
    ImportOption,
    PluginOption,
    SeedOption,
    apply_plugins,
    import_modules,
)
from opweave.cli.output import CliError, PlainTable, err, out
from opweave.cli.record import shown_time
from opweave.conformance import CHECKS, Result, Subject, certificate, subjects, summary, verify
from opweave.conformance.checks import QUICK
from opweave.conformance.find import with_inputs
from opweave.conformance.kernel_process import Verifier, VerifyTask
from opweave.conformance.subject import select
from opweave.ir.priority import NATIVE
from opweave.ir.rules import ROUNDS_LESS
from opweave.platforms import current_platform

if TYPE_CHECKING:
    from opweave.tuning import Measurement

    Times = dict[Subject, tuple[Measurement, Measurement]]  # of the implementation and of native

_MAX_FINDINGS = 5  # of an implementation; further ones are counted
_TIMING_EFFORT = (7, 0.002)  # rounds, seconds per turn

_MARKS = {
    "passed": "[green]passed[/]",
    "failed": "[bold red]failed[/]",
    "unverified": "[yellow]unverified[/]",
}


def verify_command(
    *,
    op: Annotated[list[str] | None, Parameter(negative=())] = None,
    provider: Annotated[list[str] | None, Parameter(negative=())] = None,
    platform: str | None = None,
    check: Annotated[list[str] | None, Parameter(negative=())] = None,
    import_: ImportOption = None,
    seed: SeedOption = 0,
    input_: Annotated[list[str] | None, Parameter(name="--input", negative=())] = None,
    timeout: float = 300.0,
    quick: Flag = False,
    in_process: Flag = False,
    no_timing: Flag = False,
    certificate_: Annotated[
        str | None, Parameter(name="--certificate", allow_leading_hyphen=True)
    ] = None,
    plugin: PluginOption = None,
    json: Flag = False,
) -> int:
    """Verify implementations: values, memory, metadata, traits, predicates, compiled calls.

    Then measures the time of a call of each correct implementation and of the definition, with 256
    tokens and, if the op's input generator supports them, the sizes of an 8B model.

    Exits with 1 if an implementation is wrong, or none could be verified here.

    Parameters
    ----------
    op
        Verify implementations of this op only; repeatable.
    provider
        Verify this provider only; repeatable. A name that is not registered is imported as a
        module.
    platform
        Verify on the device of this platform; by default the current one.
    check
        Run this check only; repeatable.
    seed
        Seed of the inputs.
    input_
        An option of the op's input generator, such as hidden_size=4096, for kernels that support
        certain sizes only; repeatable.
    timeout
        Timeout of a case in seconds.
    quick
        Run only the checks that take about a second, unless --check names others.
    in_process
        Verify in this process, for a debugger; a crashing kernel then ends the command.
    no_timing
        Do not measure the time of a call.
    certificate_
        Write the results to this file as JSON, compressed if its name ends in .xz; "-" is standard
        output.
    json
        Print JSON.
    """
    from opweave.tuning.timing import busy

    output.check_writable("--certificate", certificate_)
    if json and certificate_ == "-":
        raise CliError("--json and --certificate - cannot both go to standard output.")
    if not timeout > 0:
        raise CliError(f"--timeout {timeout:g} should be a positive number of seconds.")
    select(CHECKS, check or ())
    if in_process:
        import_modules(import_)
    else:
        sys.path.append(os.getcwd())
    busy_reason = busy()  # before the load of this command itself
    with redirect_stdout(sys.stderr):  # stdout is for results only
        apply_plugins(plugin)
        checks = tuple(check or (QUICK if quick else ()))
        task = VerifyTask(tuple(import_ or ()), checks, seed)
        named = op or (), provider or (), platform
        if in_process:
            selected = with_inputs(subjects(*named), input_ or ())
            run = partial(verify, checks=checks, seed=seed)
            results = [_reported(run, subject) for subject in _progress(selected)]
        else:
            with Verifier(task, timeout) as verifier:
                selected = with_inputs(verifier.subjects(*named), input_ or ())
                results = [_reported(verifier.verify, s) for s in _progress(selected)]
        times = {} if in_process or no_timing else _measure(results, task.modules)
    issued = certificate(results, seed=seed)
    if json:
        rows = zip(issued["results"], results, strict=True)
        output.print_json({**issued, "results": [{**row, **_as_data(times, r)} for row, r in rows]})
    elif certificate_ != "-":
        _print(results, times, busy_reason, _again(import_ or (), seed))
    if certificate_ is not None:
        output.write_json("--certificate", certificate_, issued)
    counts = summary(results)
    return 1 if counts["failed"] or not counts["passed"] or _excluded(times) else 0


def _reported(run: Callable[[Subject], Result], subject: Subject) -> Result:
    """Return the result, and print it to standard error where there is no progress bar."""
    result = run(subject)
    if not err.is_terminal:
        counts = f"{result.passed} cases, {result.seconds:.1f} s"
        err.print(f"{subject} {result.status}: {counts}", markup=False, highlight=False)
    return result


def _measure(results: list[Result], modules: tuple[str, ...]) -> Times:
    """Measure the implementations that passed, with the definition, in a process of its own."""
    from opweave.tuning import Effort, Task
    from opweave.tuning.measure import TuningWorker

    device = current_platform.device_type
    passed = [result.subject for result in results if result.status == "passed"]
    subjects = [s for s in passed if not s.is_native and s.device == device]
    times: Times = {}
    with TuningWorker(Task(modules, Effort(*_TIMING_EFFORT))) as worker:
        for subject in _progress(subjects, "timing"):
            measured = worker.measure_subject(subject)
            if not isinstance(measured, str):
                times[subject] = measured[subject.provider], measured[NATIVE]
    return times


def _as_data(times: Times, result: Result) -> dict[str, float | None]:
    measured = times.get(result.subject, (None, None))
    names = ("microseconds", "definition_microseconds")
    return {
        name: m.time.microseconds if m and m.time else None
        for name, m in zip(names, measured, strict=True)
    }


def _excluded(times: Times) -> list[str]:
    """Return the implementations that are wrong on the larger arguments of the measurement."""
    return [
        f"{subject} {m.status} with 256 tokens: {m.reason}"
        for subject, (m, _) in times.items()
        if m.status in ("failed", "crashed")
    ]


def _progress(subjects: list[Subject], action: str = "verifying") -> Iterator[Subject]:
    """Yield each subject, and show it in the progress bar."""
    with output.progress_bar(action) as progress:
        for i, subject in enumerate(subjects):
            progress(i, len(subjects), str(subject))
            yield subject
            progress(i + 1, len(subjects), str(subject))


def _again(modules: Sequence[str], seed: int) -> str:
    """Return the options of the command that find the same problem again."""
    return " ".join([*(f"--import {module}" for module in modules), f"--seed {seed}"])


def _print(results: list[Result], times: Times, busy_reason: str | None, options: str) -> None:
    out.print(_table(results, times))
    if times and busy_reason is not None:
        out.print(f"{busy_reason}: do not compare the times", markup=False)
    for result in results:
        _print_findings(result, options)
    for line in _excluded(times):
        out.print(f"[bold red]✗[/] {escape(line)}")
    counts = summary(results)
    out.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))


def _print_findings(result: Result, options: str) -> None:
    """Print the first findings, one per check first: one mistake often causes many."""
    failed = [outcome for outcome in result.outcomes if outcome.problems]
    columns = ([(outcome.check, problem) for problem in outcome.problems] for outcome in failed)
    findings = [finding for row in zip_longest(*columns) for finding in row if finding is not None]
    for check, problem in findings[:_MAX_FINDINGS]:
        out.print(f"[bold red]✗[/] {escape(f'{result.subject} {check}')}: {escape(problem)}")
    if findings:
        name = f"--op {result.subject.op.name} --provider {result.subject.provider}"
        check = f"--check {findings[0][0]}"
        out.print(f"  again: opweave verify {name} {check} {options}", markup=False)
    more = len(findings) - _MAX_FINDINGS
    if more > 0:
        out.print(f"  … {more} more findings for {escape(str(result.subject))}: see --json")


def _table(results: list[Result], times: Times) -> Table:
    columns = ("µs", "definition µs") if times else ()
    table = PlainTable("op", "provider", "outcome", "cases", "seconds", *columns, "by")
    for result in results:
        measured = [m.time if m else None for m in times.get(result.subject, (None, None))]
        failed = [o.check for o in result.outcomes if o.problems]
        table.add_row(
            result.subject.op.name,
            escape(result.subject.provider),
            _MARKS[result.status],
            str(result.passed) if result.outcomes else "-",
            f"{result.seconds:.1f}" if result.outcomes else "-",
            *(map(shown_time, measured) if times else ()),
            escape(", ".join(failed) or result.obstacle or _checks(result)),
        )
    return table


def _checks(result: Result) -> str:
    passed = sum(outcome.passed > 0 for outcome in result.outcomes)
    count = "1 check" if passed == 1 else f"{passed} checks"
    less = result.subject.has(ROUNDS_LESS)
    return f"{count}; rounds less often than the definition" if less else count
