"""``opweave explain``: which kernels a model runs and why, op by op or compiled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from opweave import ir
from opweave.cli.companions import model_runner
from opweave.cli.compilation import CompilationOption, apply_compilation
from opweave.cli.errors import CliError
from opweave.cli.files import STDOUT, check_writable, write, write_json
from opweave.cli.flag import Flag
from opweave.cli.imports import ImportOption, import_modules
from opweave.cli.output import out
from opweave.cli.plugin_options import PluginOption, apply_plugins
from opweave.cli.priorities import (
    PriorityOption,
    TuningFileOption,
    apply_priorities,
    apply_tuning,
)
from opweave.cli.progress import progress_bar
from opweave.cli.prompts import check_utf8
from opweave.cli.selections import selection_table, selections
from opweave.ir.errors import OpweaveError

if TYPE_CHECKING:
    import torch

    from opweave.compile import Report

PROMPT = "The quick brown fox jumps over the lazy dog"


def explain(
    model: Path,
    /,
    *,
    compile: Flag = False,
    profile: Flag = False,
    html: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    prompt: str = PROMPT,
    dtype: str = "auto",
    ir_op_priority: PriorityOption = None,
    tuning_file: TuningFileOption = None,
    compilation_config: CompilationOption = None,
    plugin: PluginOption = None,
    import_: ImportOption = None,
) -> None:
    """Show which kernels a model runs, and why others were rejected.

    Parameters
    ----------
    model
        A directory with config.json, safetensors and tokenizer.json; or a GGUF file.
    compile
        Compile the model and show the decisions of every pass; otherwise run it op by op.
    profile
        Also time each kernel on its actual arguments: µs, GB/s, and the fraction of the bandwidth
        of a large copy.
    html
        Write the compilation report to this file as HTML; "-" is standard output.
    json
        Write the results to this file as JSON; "-" is standard output.
    prompt
        The text to run the model on.
    dtype
        auto (the checkpoint's), float32, bfloat16 or float16.
    """
    check_utf8(prompt)
    import_modules(import_)
    _check(html, json, compiles=compile, profiles=profile)
    apply_plugins(plugin)
    apply_priorities(ir_op_priority)
    apply_tuning(tuning_file)
    apply_compilation(compilation_config)
    if compile:
        _compiled(model, prompt, dtype, json, html)
    else:
        _eager(model, prompt, dtype, json, profiles=profile)


def _check(html: str | None, json: str | None, *, compiles: bool, profiles: bool) -> None:
    if profiles and compiles:
        raise CliError("--profile times kernels op by op. Leave out --compile.")
    if html is not None and not compiles:
        raise CliError("--html needs --compile.")
    if html == json == STDOUT:
        raise CliError("--html and --json cannot both go to standard output.")
    check_writable("--html", html)
    check_writable("--json", json)


def _eager(model: Path, prompt: str, dtype: str, json: str | None, *, profiles: bool) -> None:
    from opweave.cli.profile import Timing, as_data, profiled, timing_table

    runner = model_runner("explain")
    with progress_bar("loading") as loading:
        generate = runner.generator(model, dtype=dtype, progress=loading)
    # The first token is computed from the whole prompt, the second from one more token.
    with ir.record() as record, progress_bar("running") as running:
        generate(prompt, 2, running)
    timings: list[Timing] = []
    if profiles:
        with profiled() as profile, progress_bar("running") as running:
            generate(prompt, 2, running)
        with progress_bar("timing") as timing:
            timings = list(profile.timings(timing))
    if json != STDOUT:
        out.print(selection_table(record))
        if timings:
            out.print()
            out.print(timing_table(timings))
    if json is not None:
        data = {"model": str(model), "selections": selections(record)}
        if profiles:
            data["timings"] = as_data(timings)
        write_json("--json", json, data)


def _compiled(model: Path, prompt: str, dtype: str, json: str | None, html: str | None) -> None:
    from opweave.cli.facts import facts
    from opweave.cli.report_tables import print_reports
    from opweave.compile.html import render

    runner = model_runner("explain")
    with progress_bar("loading") as loading:
        loaded, tokens, weights = runner.module(model, prompt, dtype=dtype, progress=loading)
    start = time.perf_counter()
    with progress_bar("compiling", counts=False):
        reports, inside = _compile(loaded, tokens)
    seconds = time.perf_counter() - start
    if STDOUT not in (html, json):
        print_reports(reports, seconds)
        if inside.selected_impls:
            out.print("\n[bold]ops inside calls that are not compiled, such as attention[/]")
            out.print(selection_table(inside))
    if html is not None:
        title = f"{model.resolve().name}, {str(weights).removeprefix('torch.')}"
        write("--html", html, render(reports, title, facts()))
    if json is not None:
        found = [report.to_dict() for report in reports]
        data = {"model": str(model), "seconds": seconds, "reports": found}
        data["inside_opaque_calls"] = selections(inside)
        write_json("--json", json, data)


def _compile(model: torch.nn.Module, tokens: list[int]) -> tuple[list[Report], ir.Record]:
    """Compile the forward for a dynamic number of tokens, and run it.

    Return the report of each graph, and the record of ops inside opaque calls such as attention.
    """
    import torch

    from opweave.compile import CompiledGraph, backend, report
    from opweave.compile.compat import BackendCompilerFailed
    from opweave.config import current_compilation_config
    from opweave.conformance.compat import maybe_mark_dynamic

    reports: list[Report] = []
    options = current_compilation_config().backend_options

    def collecting(*arguments: Any) -> Any:
        compiled = backend(*arguments, options=options)
        if isinstance(compiled, CompiledGraph):
            reports.append(report())
        return compiled

    if len(tokens) == 1:
        tokens = tokens * 2  # torch specializes on a size of 1
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    for tensor in (ids, positions):
        maybe_mark_dynamic(tensor, 0)  # a kernel may want one size
    try:
        with torch.inference_mode(), ir.record() as inside:
            torch.compile(model, backend=collecting)(ids, positions)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, OpweaveError):  # about the user's input
            raise error.inner_exception from error
        raise
    return reports, inside
