"""The benchmarks keep their contract: what they measure, what they print, how they refuse."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from native.oracle import using_threads
from opweave import ir, native

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # at the end: its engine.py is not the tests' engine

import kernels  # noqa: E402
from harness import Watch  # noqa: E402
from kernel_cells import plot, results, summary  # noqa: E402
from kernel_cells.cases import CASES, ops_with_kernels  # noqa: E402
from kernel_cells.cell import Cell, Grid, cells_of, dynamic_dims  # noqa: E402
from kernel_cells.contenders import ours, rejection, torch_baseline  # noqa: E402
from kernel_cells.eager import globals_of  # noqa: E402
from kernel_cells.measure import Results, is_worth_longer, least_microseconds  # noqa: E402
from kernel_cells.shape import Shape  # noqa: E402
from support.warm_python import warm_python  # noqa: E402

pytestmark = pytest.mark.skipif(
    not native.available() and os.environ.get("TEST_EXPECT_NATIVE") == "0",
    reason="built without the native module on purpose",
)
OPS = [op.name for op in ops_with_kernels()]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def small_cells(name: str) -> list[Cell]:
    grid = Grid([name], DTYPES, [1, 7, 128], [512], [1])
    return [cell for family in cells_of(grid) for cell in family]


def tensors(found: Any) -> list[torch.Tensor]:
    values = found if isinstance(found, tuple) else (found,)
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_an_op_without_a_case_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(CASES, "rms_norm")
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--ops", "silu_and_mul"])
    assert stopped.value.code == 2
    assert "rms_norm" in capsys.readouterr().err


@pytest.mark.parametrize("name", OPS)
def test_what_is_measured_is_the_op(name: str) -> None:
    """The kernel in every state, and the baseline where it replaces native, agree."""
    for cell in small_cells(name):
        inputs = cell.inputs()
        reason = rejection(cell, inputs)
        if reason == "the implementation leaves it to torch":
            continue
        assert reason is None, cell
        expected = tensors(cell.op.native(*inputs))
        for state in cell.states:
            contender = ours(cell, state, [inputs])
            found = tensors(contender.call(*contender.ring[0]))
            if not found:  # the native function: its outputs are among its arguments
                made = {id(value) for value in inputs}
                arguments = tensors(contender.ring[0])
                found = [value for value in arguments if id(value) not in made]
            assert_same_kinds(found, expected, cell)
            compare(cell, found, expected)


def assert_same_kinds(found: list[torch.Tensor], expected: list[torch.Tensor], cell: Cell) -> None:
    kinds = sorted((str(value.dtype), tuple(value.shape)) for value in expected)
    assert sorted((str(value.dtype), tuple(value.shape)) for value in found) == kinds, cell


def compare(cell: Cell, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for value in expected:
        atol, rtol = cell.op.get_tolerance(value.dtype)
        assert any(
            other.shape == value.shape
            and torch.allclose(other.float(), value.float(), atol=atol, rtol=rtol)
            for other in found
        ), cell


REPLACED = ["attention_quant", "paged_attention", "reshape_and_cache", "rope_reshape_and_cache"]


@pytest.mark.parametrize("name", REPLACED)
def test_baselines_that_replace_native_compute_the_same(name: str) -> None:
    for cell in small_cells(name):
        inputs = cell.inputs()
        expected = tensors(cell.op.native(*inputs))
        found = tensors(torch_baseline(cell)(*inputs)) or list(inputs[2:4])  # in place
        for value, wanted in zip(found, expected, strict=True):
            atol, rtol = 2e-2, 2e-2
            if value.dtype == torch.float8_e4m3fn:
                atol, rtol = cell.op.get_tolerance(value.dtype)
            torch.testing.assert_close(value.float(), wanted.float(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", OPS)
def test_baselines_are_plain_torch(name: str) -> None:
    baseline = torch_baseline(small_cells(name)[0])
    used = {name: baseline.__globals__.get(name) for name in globals_of(baseline)}
    assert not [name for name, value in used.items() if isinstance(value, ir.IrOp)]


def test_dynamic_dimensions_are_those_that_follow_the_tokens() -> None:
    rotary = Cell("rotary_embedding", 0, Shape(16, 512, torch.float32), 1)
    assert dynamic_dims(rotary) == [[0], [0], [0], [], [], []]
    decode = Cell("paged_attention", 0, Shape(16, 512, torch.float32, 512), 1)
    assert dynamic_dims(decode)[0] == [0]


# The command


QUICK = ("--quick", "--ops", "relu2", "--tokens", "1", "2048", "--hidden", "512", "--rounds", "3")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The object of a small run, and the picture."""
    picture = tmp_path_factory.mktemp("plot") / "kernels.svg"
    done = run(*QUICK, "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), picture.read_text(encoding="utf-8")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_json_obeys_the_contract(printed: tuple[dict[str, Any], str]) -> None:
    found, _ = printed
    assert set(found) == {"machine", "rows", "skipped"}
    assert found["machine"]["allocator"]["library"]
    assert "mallopt" in found["machine"]["allocator"]["tuned by"]
    assert set(found["machine"]["stream_gb_per_second"]["1"]) > {"out of cache"}
    disturbed = found["machine"]["disturbed"]["1"]
    assert disturbed["taken"] >= disturbed["kept"] >= 0
    assert len(found["rows"]) == 4
    for row in found["rows"]:
        assert row["name"] == "kernel.relu2"
        assert row["unit"] == "us"
        assert row["outputs"] in row["case"]
        assert row["value"] > 0
        assert ("limit_share" in row) == ("stream_share" in row) == (row["tokens"] == 2048)
        assert row.get("page_faults", 0) < 100
        assert 0 <= row["disturbed"] <= 1
        if row["outputs"] == "fresh" and row["tokens"] == 2048:  # reads as much as it writes
            assert row["stream_share"] == pytest.approx(row["limit_share"], rel=0.01)


def test_a_ratio_is_baseline_over_value(printed: tuple[dict[str, Any], str]) -> None:
    for row in printed[0]["rows"]:
        assert row["ratio"] == pytest.approx(row["baseline"] / row["value"], rel=1e-3)
        assert row["baseline"] == min(row["eager"], row["inductor"]) == row[row["against"]]


def test_the_picture_has_a_dot_for_each_figure(printed: tuple[dict[str, Any], str]) -> None:
    _, picture = printed
    assert picture.count("<title>") == 2 + 2 + 1  # eager, Inductor; the share of the large cell
    assert "relu2" in picture


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--ops", "rms_nrom"), "rms_norm"),
        (("--ops", "embedding"), "embedding"),
        (("--dtypes", "float64"), "float32"),
        (("--tokens", "0"), "tokens"),
        (("--hidden", "100"), "128"),
        (("--threads", "9999"), "9999"),
        (("--rounds", "1"), "rounds"),
        (("--patience", "-1"), "patience"),
        (("--patience", "nan"), "patience"),
        (("--plot", "no/such/folder/x.svg"), "no/such/folder"),
        (("--wat",), "--wat"),
    ],
)
def test_bad_options_are_one_line(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        kernels.main(list(arguments))
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert named in captured.err


# Tables from rows


def row(**changed: Any) -> dict[str, Any]:
    base = {
        "name": "kernel.relu2", "case": "float32, 2048 x 512, 1 thread, fresh output",
        "value": 10.0, "unit": "us", "baseline": 20.0, "ratio": 2.0, "against": "inductor",
        "eager": 30.0, "inductor": 20.0, "variant": "", "dtype": "float32", "tokens": 2048,
        "hidden": 512, "context": 0, "threads": 1, "outputs": "fresh",
    }  # fmt: skip
    return base | changed


def test_the_limit_is_a_copy_of_what_is_written_and_a_read_of_the_rest() -> None:
    speeds = {"copy": 10.0, "read": 20.0, "update": 40.0}  # GB/s, so 1000 bytes take 0.1 us at 10
    assert least_microseconds(1000, 1000, speeds, in_place=False) == pytest.approx(0.2)
    assert least_microseconds(1000, 1000, speeds, in_place=True) == pytest.approx(0.05)
    assert least_microseconds(3000, 1000, speeds, in_place=False) == pytest.approx(0.3)
    assert least_microseconds(1000, 0, speeds, in_place=False) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("row", "is_worth_it"),
    [
        ({"ratio": 1.06}, True),
        ({"ratio": 0.94}, True),
        ({"ratio": 1.2}, False),
        ({"ratio": 2.0, "stream_share": 0.78, "least_share": 0.8}, True),
        ({"ratio": 2.0, "stream_share": 0.7, "least_share": 0.8}, False),
        ({"ratio": 2.0, "stream_share": 0.02, "least_share": 0.0}, False),
        ({"ratio": 2.0, "disturbed": 0.2}, True),
        ({"ratio": 2.0, "disturbed": 0.05}, False),
    ],
)
def test_cells_are_measured_longer_near_a_bar_or_if_disturbed(
    row: dict[str, float], is_worth_it: bool
) -> None:
    assert is_worth_longer({"disturbed": 0.0} | row) == is_worth_it


class Busy(Watch):
    """Sees a core that is disturbed as often as *looks* says, and quiet afterwards."""

    def __init__(self, looks: int, patience: float) -> None:
        super().__init__(patience)
        self.looks = looks

    def is_quiet(self) -> bool:
        self.looks = getattr(self, "looks", 0) - 1
        return self.looks < 0


def test_what_is_disturbed_is_measured_again() -> None:
    watch, calls = Busy(looks=3, patience=60.0), iter(range(9))
    assert watch.undisturbed(lambda: next(calls)) == 0  # it waits first
    watch.looks = 0
    assert [watch.undisturbed(lambda: next(calls)) for _ in range(2)] == [1, 2]
    assert (watch.taken, watch.repeated, watch.kept) == (3, 0, 0)

    def disturbed() -> int:
        watch.looks = 1 if (found := next(calls)) == 3 else 0
        return found

    assert watch.undisturbed(disturbed) == 4
    assert (watch.taken, watch.repeated, watch.kept) == (4, 1, 0)
    assert watch.seconds > 0


def test_patience_ends() -> None:
    watch = Busy(looks=10**9, patience=0.01)
    assert watch.undisturbed(lambda: 7) == 7
    assert (watch.taken, watch.kept) == (1, 1)
    before = watch.seconds
    assert watch.undisturbed(lambda: 8) == 8  # at once
    assert watch.seconds == before
    watch.renew(times=2)
    watch.undisturbed(lambda: 9)
    assert watch.seconds - before >= 0.02


def test_what_takes_longer_than_ever_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(patience=0.0)
    monkeypatch.setattr(watch, "_least", 1.0)
    for seconds, is_quiet in ((1.2, True), (1.3, False), (0.5, True), (0.7, False)):
        monkeypatch.setattr(watch, "_look_up", lambda seconds=seconds: seconds)
        assert watch.is_quiet() == is_quiet


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.timed
def test_every_thread_looks() -> None:
    with using_threads(2):
        watch = Watch(patience=0.0)
        start, seconds = time.process_time(), time.thread_time()
        for _ in range(1000):
            watch._look_up()
        others = time.process_time() - start - (time.thread_time() - seconds)
        assert others > 0.5 * (time.thread_time() - seconds)


def test_below_the_bar() -> None:
    fine = [row(), row(outputs="reused", stream_share=0.9, limit_share=0.9, least_share=0.8)]
    slow = row(hidden=1024, inductor=9.0)
    short = [
        row(hidden=2048),
        row(hidden=2048, outputs="reused", stream_share=0.7, limit_share=0.6, least_share=0.8),
    ]
    cells = summary.cells_of_rows([*fine, slow, *short])
    assert [cell["hidden"] for cell in summary.below_the_bar(cells)] == [1024, 2048]
    assert cells[1].shortfalls == ["0.90 x Inductor"]
    assert cells[2].shortfalls == ["70% of the stream, not 80%"]


def test_results_name_the_command(tmp_path: Path) -> None:
    machine = {
        "processor": "P", "cores": 2, "python": "3", "torch": "2", "threads": [1], "load": 0.0,
        "isa": "avx2", "allocator": {"library": "glibc"},
        "stream_gb_per_second": {"1": {"out of cache": {"copy": 10.0}}},
        "disturbed": {"1": {"taken": 1000, "repeated": 30, "kept": 2, "seconds": 1.0}},
        "commands": ["python kernels.py --save"], "again": [],
    }  # fmt: skip
    skipped = [{"name": "kernel.x", "case": "float32", "reason": "too wide"}]
    failed = row(no_inductor="it broke", hidden=64)
    del failed["inductor"]
    large = [
        row(tokens=4096),
        row(tokens=4096, outputs="reused", stream_share=0.85, limit_share=0.7, least_share=0.8),
    ]
    rows = [row(), *large, failed]
    results.write(tmp_path, machine, Results(rows, skipped))
    page = (tmp_path / "kernels_avx2.md").read_text(encoding="utf-8")
    assert "`python kernels.py --save`" in page
    assert "(kernels_avx2.svg)" in page
    assert "on 1 thread: 30 and 2 of 1,000." in page
    assert "| relu2 | float32, 512 | 3.00, 2.00 | 3.00, 2.00, 85% (70%) |" in page
    assert "0 of 1 cells reach that share" in page
    assert "too wide" in page
    assert "it broke" in page
    assert "(kernels_avx2.json.xz)" in page
    with lzma.open(tmp_path / "kernels_avx2.json.xz") as file:
        saved = json.load(file)
    assert saved["machine"] == machine
    assert saved["skipped"] == skipped
    assert saved["columns"]["value"] == [row["value"] for row in rows]
    assert saved["columns"]["no_inductor"] == [None, None, None, "it broke"]
    assert results.read(tmp_path, "avx2") == (machine, Results(rows, skipped))
    assert (tmp_path / "kernels_avx2.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("isa", ["amx", "avx2", "avx512bf16"])
def test_saved_results_can_be_read_and_are_small(isa: str) -> None:
    machine, found = results.read(kernels.RESULTS, isa)
    assert machine["isa"] == isa
    assert len(found.rows) > 3000
    assert {"name", "case", "value", "baseline"} <= set.intersection(*map(set, found.rows))


def test_raw_results_and_certificates_stay_small() -> None:
    raw = [*ROOT.glob("benchmarks/results/*.json*"), *ROOT.glob("docs/reference/certificate.*")]
    assert len(raw) >= 4
    assert sum(path.stat().st_size for path in raw) < 300_000


@pytest.mark.slow
def test_what_was_disturbed_is_measured_anew_whatever_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "RESULTS", tmp_path)
    few = ["--ops", "relu2", "--dtypes", "float32", "--tokens", "1", "--hidden", "128", "256"]
    few += ["--threads", "1", "--rounds", "2", "--patience", "0"]
    with pytest.raises(SystemExit):
        kernels.main([*few, "--save", "--disturbed"])
    assert "No such file" in capsys.readouterr().err
    kernels.main([*few, "--save"])
    machine, found = results.read(tmp_path, native.status().isa or "")
    for at, disturbed in enumerate((0.0, 0.0, 0.2, 0.0)):
        found.rows[at] |= {"disturbed": disturbed, "value": 1e9}
    results.write(tmp_path, machine, found)
    kernels.main([*few, "--save", "--disturbed"])
    merged, again = results.read(tmp_path, machine["isa"])
    assert [row["value"] == 1e9 for row in again.rows] == [True, True, False, False]
    assert [row["case"] for row in again.rows] == [row["case"] for row in found.rows]
    assert merged["commands"][1].endswith("--disturbed")
    assert merged["again"][0]["cells"] == 1
    page = (tmp_path / f"kernels_{machine['isa']}.md").read_text(encoding="utf-8")
    assert "--save`, then `python" in page
    assert "\nregardless of the result (1 cells):\non 1 thread: 0 and " in page
    results.write(tmp_path, machine | {"kernels": "others"}, found)
    with pytest.raises(SystemExit):
        kernels.main([*few, "--save", "--disturbed"])
    assert "kernels 'others', here" in capsys.readouterr().err


def test_the_picture_says_what_is_outside_of_its_scale_and_where_each_bar_is() -> None:
    fine = [row(), row(outputs="reused", stream_share=0.9, limit_share=0.9, least_share=0.8)]
    quick = [row(name="kernel.y", eager=2000.0), row(name="kernel.y", outputs="reused")]
    decode = [
        row(name="kernel.z"),
        row(name="kernel.z", outputs="reused", stream_share=0.7, limit_share=0.6, least_share=0.6),
    ]
    cells = summary.cells_of_rows([*fine, *quick, *decode])
    picture = plot.draw(cells, {"processor": "P", "torch": "2", "threads": [1]})
    legend, drawn = picture.split("share of the stream")
    for said in ("median of the kernel", "outside of the scale", "the bar", "below the bar"):
        assert f">{said}</text>" in legend
    triangles = re.findall(r"<polygon [^>]*><title>(.*?)</title>", picture)
    assert [title.split(":")[0] for title in triangles] == ["y"]
    bars = re.findall(rf'<line x1="([\d.]+)".* stroke="{plot._BAD}"', drawn)
    assert len(set(bars)) == 2  # of a prompt and of decoding; a kernel without one has none
    assert len(bars) == 2


def test_dispatch_keeps_its_options_and_output() -> None:
    done = warm_python().run(ROOT / "benchmarks" / "dispatch.py", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"machine", "rows"}
    assert "dispatch.one_predicate" in {row["name"] for row in found["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_any_model_compares_with_transformers(mode: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "any_model.py"), "--modes", mode]
    done = subprocess.run(
        [*command, "--models", "tiny", "--dtypes", "float32", "--rounds", "1", "--json"],
        check=True, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    cells = ["prefill", "decode/1", "decode/8"]
    assert list(rows) == [f"any_model.{mode}.{cell}" for cell in cells]
    assert all(row["value"] > 0 and row["ratio"] > 0 for row in rows.values())


def test_nothing_is_cut_where_stdout_is_no_terminal() -> None:
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = warm_python().run(ROOT / "benchmarks" / "dispatch.py", "--rounds", "2", env=env)
    assert done.returncode == 0, done.stderr
    assert "dispatch.two_rejections " in done.stdout
    assert "…" not in done.stdout


ENDS = """
import sys
from harness import run

def main():
    sys.stdout.write("x" * 100_000)
    sys.stdout.flush()
    raise KeyboardInterrupt

run(main)
"""


@pytest.mark.parametrize(("reads_on", "code"), [(True, 130), (False, 0)])
def test_a_benchmark_ends_quietly(tmp_path: Path, reads_on: bool, code: int) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
    ) as process:
        if not reads_on:
            process.stdout.close()
        _, errors = process.communicate(timeout=60) if reads_on else ("", process.stderr.read())
    assert (process.returncode, errors) == (code, b"")


@pytest.mark.slow
def test_the_engine_keeps_its_contract(tmp_path: Path) -> None:
    picture = tmp_path / "engine.svg"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--size=tiny", "--rounds=1",
            "--requests=3", "--steps=3", "--json", "--plot", str(picture),
        ],
        check=True, capture_output=True, text=True, timeout=240,
        env=os.environ | {"LLAMA_CPP_PYTHON": ""},
    )  # fmt: skip
    assert done.stderr.count("\n") == 1
    assert "llama.cpp is left out" in done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"machine", "rows"}
    rows = {row["name"]: row for row in found["rows"]}
    assert {"engine.throughput", "engine.throughput.generate", "engine.prefill"} <= rows.keys()
    assert rows["engine.throughput"]["equal_answers"] == rows["engine.throughput"]["answers"] == 6
    for weights in ("", ".int8", ".fp8"):
        row = rows[f"engine.decode_bandwidth{weights}"]
        assert row["limit_share"] == pytest.approx(row["value"] / row["limit"], rel=1e-2)
    for row in found["rows"]:
        assert min(row["value"], row["baseline"], row["ratio"]) > 0
        assert row["unit"] in ("tokens/s", "ms")
    latencies = [rows[f"engine.latency.last_token.p{p}"]["value"] for p in (50, 90, 99)]
    assert latencies == sorted(latencies)
    assert picture.read_text(encoding="utf-8").count("<title>") == len(found["rows"])


def main_of(name: str) -> Callable[[list[str]], int]:
    """Return ``main`` of a benchmark whose name another module has, too."""
    spec = spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rounds", "0"), "--rounds"),
        (("--size", "huge"), "huge"),
        (("--plot", "no/such/folder/x.svg"), "no/such/folder"),
        (("--llama-cpp", "no/such/python"), "no/such/python cannot be run"),
    ],
)
def test_bad_options_of_the_engine_are_one_line(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main_of("engine")(list(arguments))
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert named in captured.err
