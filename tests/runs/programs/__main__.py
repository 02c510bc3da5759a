"""Compare what random programs return and change, compiled and in eager mode.

    python tests/runs/programs --programs 200 --seed 1 --json

A program is a list of Python statements over inputs that may share memory: views, in-place
operators on any live tensor, ops of the IR, functional and donating, with kernels of every kind,
ops spelled in plain PyTorch and near misses of them.
Results, inputs after the call, gradients, and which of them share memory are compared, within the
program's own sensitivity to rounding. Programs are compiled several at a time.

With ``--near-misses``, programs are the graphs of spellings and composites with one change each,
and only the passes run.

With ``--state FILE``, an interrupted run continues. A mismatch is printed as the shortest program
that still shows it; it is torch's own if ``backend="aot_eager"``, or Inductor with opaque ops,
shows one, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "packages/opweave/tests"))

from opweave.compile import report
from runs.programs.examine import examine
from runs.programs.kernels import open_library
from runs.programs.near_misses import examine_near_miss, originals, plan_for_near_misses


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the file at once: an interrupted run must find a whole one."""
    written = path.with_suffix(".new")
    written.write_text(json.dumps(state), encoding="utf-8")
    written.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--batch", type=int, default=8, help="programs in one graph")
    parser.add_argument(
        "--spellings", type=float, default=0.3, help="share of steps that spell an op in PyTorch"
    )
    parser.add_argument(
        "--codegen", choices=["drawn", "never", "always"], default="drawn", help="use Inductor"
    )
    parser.add_argument("--state", type=Path, help="file that an interrupted run continues from")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--near-misses",
        action="store_true",
        help="change one thing in a spelling or composite, and run only the passes",
    )
    given = parser.parse_args()
    state: dict[str, Any] = {"next": given.seed, "programs": 0, "generated": 0}
    state |= {"recognized": 0, "fused": 0, "findings": []}
    if given.state and given.state.exists():
        state = json.loads(given.state.read_text(encoding="utf-8"))
    if given.near_misses:
        compare_near_misses(given.programs, state, given.state)
    else:
        compare_programs(given, state)
    print(file=sys.stderr)
    own = [found for found in state["findings"] if not found["torch"]]
    if given.json:
        print(json.dumps(state))
    else:
        for found in own:
            print(f"seed {found['seed']}: {found['difference']}", *found["sources"], sep="\n")
        counts = (
            f"{state['programs']} programs, {state['generated']} through Inductor",
            f"{state['recognized']} spellings recognized, {state['fused']} composites fused",
            f"{len(own)} mismatches and {len(state['findings']) - len(own)} of torch's own",
        )
        print(", ".join(counts))
    return 1 if own else 0


def compare_near_misses(programs: int, state: dict[str, Any], path: Path | None) -> None:
    """Draw near misses until there are *programs*, and add what differs to *state*."""
    patterns = originals()
    plan = plan_for_near_misses()
    while state["programs"] < programs:
        context, difference = examine_near_miss(state["next"], patterns, plan)
        state["recognized"] += len(context.recognized_from)
        state["fused"] += len(context.fused_from)
        state["findings"] += [difference.to_json()] if difference else []
        state["next"] += 1
        state["programs"] += 1
        if state["programs"] % 100 == 0 and path:
            save(path, state)
        print(f"\r{state['programs']} of {programs}", end="", file=sys.stderr)


def compare_programs(given: argparse.Namespace, state: dict[str, Any]) -> None:
    """Draw programs until there are enough, and add what differs to *state*."""
    codegen = {"drawn": None, "never": False, "always": True}[given.codegen]
    torch._dynamo.config.recompile_limit = 64
    with (
        tempfile.TemporaryDirectory() as cache,  # a run that is killed can leave half a file
        torch._inductor.utils.fresh_cache(dir=cache),
    ):
        library = open_library()
        while state["programs"] < given.programs:
            settings, findings = examine(
                state["next"], library, given.batch, codegen, given.spellings
            )
            if not findings:  # the last graph is the whole batch
                state["recognized"] += len(report().recognized)
            state["findings"] += [finding.to_json() for finding in findings]
            state["next"] += 1
            state["programs"] += given.batch
            state["generated"] += given.batch * settings.codegen
            if given.state:
                save(given.state, state)
            print(f"\r{state['programs']} of {given.programs}", end="", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
