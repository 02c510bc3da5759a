"""``opweave explain``: what it prints, the files that it writes, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opweave
import test_cli
from opweave import ir
from opweave.cli.explain import print_reports
from opweave.compile.report import MatchReport, NodeReport, PassReport, Refusal, Report, Reuse
from test_cli import CHECKPOINT, Done, Run, assert_one_line_error, run_anew

run = test_cli.run  # the fixture
SILU = "--ir-op-priority.silu-and-mul=native"
PARTLY_READ = ("embedding", "rotary_embedding", "paged_attention")  # ops that look up in tables
BFLOAT16_BYTES = 2  # of the checkpoint


def split_lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line]


def test_eager_prints_the_selections(run: Run) -> None:
    done = run("explain", CHECKPOINT, "--ir-op-priority.rms_norm=aten", SILU)
    assert done.returncode == 0
    lines = {words[0]: words[1:3] for words in split_lines(done.stdout)}
    assert lines["rms_norm"] == ["aten", "2"]  # for the prompt, and for one more token
    assert lines["silu_and_mul"] == ["native", "12"]
    assert "--ir-op-priority.rms_norm" in done.stdout
    assert "batch_invariant: in no priority list" in done.stdout
    assert done.stderr == ""


def test_custom_ops_decide_what_runs(run: Run) -> None:
    done = run(
        "explain", CHECKPOINT, "--json", "-", "--compilation-config.custom_ops=-silu_and_mul"
    )
    ops = {found["op"] for found in json.loads(done.stdout)["selections"]}
    assert "fused_add_rms_norm" in ops
    assert "silu_and_mul" not in ops


def test_eager_json_goes_to_a_file_or_to_standard_output(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ("explain", CHECKPOINT, "--dtype", "float32", "--prompt", "Return", "--json")
    to_file, to_stdout = run(*arguments, file), run(*arguments, "-")
    found = json.loads(file.read_text(encoding="utf-8"))
    assert json.loads(to_stdout.stdout) == found
    assert to_stdout.stderr == ""
    assert "rms_norm" in to_file.stdout
    assert to_file.stderr == f"wrote {file}\n"
    norm = next(s for s in found["selections"] if s["op"] == "rms_norm")
    assert (norm["chosen"], norm["calls"]) == ("opweave_c", 2)
    assert "float32" in norm["call"]


class Compiled(NamedTuple):
    """Two runs with one cache, and what they wrote."""

    first: Done
    second: Done
    found: list[Any]
    pages: list[str]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("explain")
    runs, found, pages = [], [], []
    for i in range(2):
        page, data = folder / f"{i}.html", folder / f"{i}.json"
        done = run_anew(
            "explain", CHECKPOINT, "--compile", "--html", page, "--json", data, SILU,
            OPWEAVE_LOGGING_LEVEL="debug", TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"),
            OMP_NUM_THREADS="1",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs.append(done)
        found.append(json.loads(data.read_text(encoding="utf-8")))
        pages.append(page.read_text(encoding="utf-8"))
    return Compiled(runs[0], runs[1], found, pages)


def test_compiled_prints_the_decisions(compiled: Compiled) -> None:
    lines = {
        line.split()[0]: line.split()[1:3] for line in compiled.first.stdout.splitlines() if line
    }
    assert lines["silu_and_mul"] == ["native", "6"]
    assert lines["fused_add_rms_norm"] == ["opweave_c", "12"]
    assert "50 calls of ops" in compiled.first.stdout
    assert "compiled 1 graph" in compiled.first.stdout
    assert lines["causal_attention"] == ["aten", "6"]
    for found in compiled.found:
        (attention,) = found["inside_opaque_calls"]
        assert (attention["op"], attention["calls"]) == ("causal_attention", 6)


def test_compiled_for_any_number_of_tokens(compiled: Compiled) -> None:
    (report,) = compiled.found[0]["reports"]
    norm = next(node for node in report["nodes"] if node["op"] == "rms_norm")
    assert norm["call"].startswith("x=bfloat16[s")
    assert report["selected_impls"]["rms_norm"] == {norm["node"]: "opweave_c"}


def test_compiled_writes_the_page(compiled: Compiled) -> None:
    page = compiled.pages[0]
    assert page.startswith("<!doctype html>")
    assert "<h1>tiny-pydoc, bfloat16</h1>" in page
    assert "lower in place" in page


def test_a_cache_hit_has_the_same_report(compiled: Compiled) -> None:
    first, second = (found["reports"][0] for found in compiled.found)
    assert (first.pop("from_cache"), second.pop("from_cache")) == (False, True)
    assert first == second
    assert "this one came from the cache" in compiled.second.stdout
    assert "this one came from the cache" in compiled.pages[1]


def test_the_log_tells_it_as_it_happens(compiled: Compiled) -> None:
    assert "opweave.compile: lower functional" in compiled.first.stderr
    assert "opweave.compile: lower functional" not in compiled.second.stderr
    assert "DEBUG" not in compiled.first.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--html", "page.html"), ("--html", "--compile")),
        (("--compile", "--html", "-", "--json", "-"), ("--html", "--json", "standard output")),
        (("--json", "no/such/found.json"), ("--json", "no/such")),
        (("--compile", "--html", "no/such/page.html"), ("--html", "no/such")),
        (("--compile", "--html", "."), ("--html", "directory")),
        (("--json", ""), ("--json", "directory")),
        (("--json",), ("--json",)),
        (("--dtype", "float12"), ("float12", "bfloat16")),
        (("--compile", "--dtype", "float12"), ("float12", "bfloat16")),
        (("--ir-op-priority.rms_norm=tritn",), ("tritn", "native")),
        (("--compile", "--ir-op-priority.rmsnorm=native"), ("rmsnorm", "rms_norm")),
        (("--prompt", "\udcff"), ("UTF-8",)),
        (("--compile", "--prompt", "Return " * 5000), ("tokens",)),
        (("--compil",), ("--compil",)),
        (("--compilation-config.mod=3",), ("'mod'", "Did you mean 'mode'")),
        (("--compile", '--compilation-config={"options": {"fusoin": 0}}'), ("fusoin", "fusion")),
    ],
)
def test_bad_input_ends_in_one_line(
    run: Run, arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    assert_one_line_error(run("explain", CHECKPOINT, *arguments), *named)


@pytest.mark.parametrize("options", [(), ("--compile",)])
def test_missing_directory(run: Run, options: tuple[str, ...]) -> None:
    assert_one_line_error(run("explain", "no/such/model", *options), "no/such/model")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_file_that_cannot_be_filled(run: Run) -> None:
    done = run("explain", CHECKPOINT, "--json", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("opweave: --json '/dev/full' cannot be written: No space")


def test_fusions_and_several_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    node = NodeReport(
        "n", "op_a", "f.py:1", "", "fast", [Refusal("other", "[bold]x[/]: int", "here")],
        "kept as a call: layout", ["add"],
        [Reuse("x", False, "is read", copied=True), Reuse("y", True, "", copied=False)],
    )  # fmt: skip
    report = Report(
        complete=True, nodes=[node, node], collectives={"all_gather": 2},
        fusions=[
            MatchReport("c", "n", "fused", "add, norm"), MatchReport("d", "m", "rejected", "why"),
        ],
        passes=[PassReport("fuse", "joint", 0.5, "a", "b")],
    )  # fmt: skip
    print_reports([report, Report()], 1.5)
    shown = capsys.readouterr().out
    for said in (
        "graph 2", "other: [bold]x[/]: int [here]", "copies x: is read", "reuses y", "kept as",
        "from add, norm", "near miss", "2 all_gather", "without a report", "2 graphs in 1.5 s",
    ):  # fmt: skip
        assert said in shown


def test_profile_times_every_kernel(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert "of limit" in run("explain", CHECKPOINT, "--profile", "--json", file).stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    ran = {(each["op"], each["chosen"]) for each in found["selections"]}
    assert {(each["op"], each["provider"]) for each in found["timings"]} == ran
    for each in found["timings"]:
        assert each["microseconds"] > 0
        assert (each["bytes"] is None) == ("cache" in each["op"] or each["op"] in PARTLY_READ)
    norm = next(each for each in found["timings"] if each["op"] == "rms_norm")
    shape, (hidden,) = (json.loads(part) for part in norm["shapes"].split())
    assert norm["bytes"] == (2 * shape[0] * hidden + hidden) * BFLOAT16_BYTES
    assert norm["gb_per_second"] == pytest.approx(norm["bytes"] / norm["microseconds"] / 1e3)
    assert_one_line_error(run("explain", CHECKPOINT, "--profile", "--compile"), "--profile")


def test_compiled_calls_name_their_modules(compiled: Compiled) -> None:
    [report] = compiled.found[0]["reports"]
    modules = {node["module"] for node in report["nodes"] if node["op"] == "linear"}
    assert "model.layers.0.mlp.down_proj" in modules
    assert all(node["bytes"] for node in report["nodes"] if node["op"] == "linear")


# ``opweave.explain`` and ``print(ir.record())`` show the table of ``opweave explain``.


class Block(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for _ in range(2):
            x = ir.ops.rms_norm(x, None, 1e-6)
        return ir.ops.silu_and_mul(x * scale)


def test_a_module_of_ones_own() -> None:
    x = torch.randn(4, 8)
    with torch.no_grad(), ir.priority(rms_norm=["native"]):
        found = opweave.explain(Block(), x, scale=2.0)
    header, first, *others = str(found).splitlines()
    assert header.split("  ")[0] == "op"
    assert [cell.strip() for cell in header.split("  ") if cell] == [
        "op",
        "ran",
        "calls",
        "because of",
        "the others",
    ]
    assert [cell.strip() for cell in first.split("  ") if cell] == [
        "rms_norm",
        "native",
        "2",
        "scope ir.priority(rms_norm=...)",
        "opweave_c: native comes first",
    ]
    assert any(line.startswith("silu_and_mul") for line in others)
    assert found.selected_impls["rms_norm"] == {"native": 2}


def test_the_rows_are_those_of_the_command() -> None:
    from opweave.cli.explain import selection_table
    from opweave.cli.output import out

    with torch.no_grad():
        found = opweave.explain(Block(), torch.randn(4, 8))
    with out.capture() as captured:
        out.print(selection_table(found), width=300)
    printed = [line.split() for line in captured.get().splitlines()]
    assert [line.split() for line in str(found).splitlines()] == printed


def test_nothing_ran() -> None:
    assert str(opweave.explain(lambda: None)) == "op  ran  calls  because of  the others"
