"""benchmarks/peers.py: its plan, figures, report and processes, with stand-ins for the engines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # at the end: its engine.py is not the tests' engine

import peers  # noqa: E402
from harness import Worker, WorkerError, last_error, progress  # noqa: E402
from peer_cells import environments, report, table  # noqa: E402
from peer_cells.contenders import OPWEAVE, Answer  # noqa: E402
from peer_cells.models import LARGE, SMALL, Models  # noqa: E402

MACHINE = {"processor": "CPU <1>", "cores": 2, "torch": "2.13.0"}
ROW = {
    "name": "peers.requests", "case": "a Llama of 29 M parameters, 32 requests at once",
    "weights": "float32", "threads": 1, "engine": "vLLM", "value": 400.0, "unit": "tokens/s",
    "baseline": 200.0, "against": "vLLM 0.32.0", "ratio": 2.01, "equal_tokens": 0.996,
}  # fmt: skip
FAILED = {
    "name": "peers.requests", "case": ROW["case"], "weights": "float32", "threads": 1,
    "engine": "OpenVINO", "value": 400.0, "unit": "tokens/s", "not_measured": "no wheel | here",
}  # fmt: skip
SCALING = {
    "name": "peers.scaling", "case": "a Llama, decode, batch 1", "weights": "float32", "threads": 2,
    "engine": "vLLM", "value": 300.0, "unit": "tokens/s", "baseline": 200.0,
    "against": "vLLM 0.32.0, 1 thread(s)", "ratio": 1.5,
}  # fmt: skip


class FakeEngine:
    """Takes a second for each prompt and *seconds* for each token; fails after some answers."""

    def __init__(self, build: str, seconds: float, answers: float = math.inf) -> None:
        self.build, self.seconds, self.answers, self.closed = build, seconds, answers, False
        self.prompts: list[list[list[int]]] = []

    def generate(self, prompts: list[list[int]], counts: list[int]) -> Answer:
        if len(self.prompts) >= self.answers:
            raise WorkerError(f"{self.build} has stopped")
        self.prompts.append(prompts)
        return Answer([[1] * n for n in counts], len(prompts) + self.seconds * sum(counts))

    def close(self) -> None:
        self.closed = True


# The plan


def test_every_row_has_its_engines_and_threads() -> None:
    float32, bfloat16, large, low_bit = table.groups(table.ROWS, [2, 1], table.PEERS)
    assert (float32.loads, float32.threads, float32.scales) == (
        ("requests", "prompts", "decode"), (1, 2), True,
    )  # fmt: skip
    assert [c.peer for c in float32.comparisons] == list(table.PEERS)
    assert (bfloat16.model, bfloat16.loads, bfloat16.threads) == (SMALL, ("requests",), (1, 2))
    assert (large.model, large.loads, large.threads) == (LARGE, ("decode", "prompts"), (2,))
    assert [c.own for c in low_bit.comparisons] == ["w4a16", "q4_0", "q4_k"]
    assert {c.peer for c in low_bit.comparisons} == {"llama.cpp"}


@pytest.mark.parametrize(("rows", "threads", "engines", "loads"), [
    (["scaling"], [1], table.PEERS, []),
    (["scaling"], [1, 2], ["vLLM"], [("decode",)]),
    (["decode"], [1, 2], ["vLLM"], [("decode",)]),
    (["requests"], [1], ["llama.cpp"], []),
    (["low-bit"], [1], ["vLLM", "llama.cpp"], [("decode", "prompts")]),
])  # fmt: skip
def test_only_the_requested_part_runs(
    rows: list[str], threads: list[int], engines: list[str], loads: list[tuple[str, ...]]
) -> None:
    planned = table.groups(rows, threads, engines)
    assert [group.loads for group in planned] == loads
    assert {c.peer for group in planned for c in group.comparisons} <= set(engines)


# The figures


@pytest.mark.parametrize(("first", "seconds"), [
    (3.0, 17.0),
    (25.0, 10.0),  # disturbed: 16 tokens of a prompt take as long as 16 steps at most
    (0.1, 20 * 16 / 17),  # the other answer was disturbed, as a prompt takes one step at least
])  # fmt: skip
def test_decoding_leaves_out_the_prompt(first: float, seconds: float) -> None:
    speed = table.decode_speed(16, Answer([[1]], first), Answer([[1] * 17], 20.0))
    assert speed == pytest.approx(16 / seconds)


def test_decoding_draws_its_prompt_from_the_seed() -> None:
    engine = FakeEngine("fake", seconds=0.25)
    _, tokens = table.speed(engine, "decode", SMALL, 320, seed=3)
    assert len(tokens[0]) == 65
    other = FakeEngine("other", seconds=0.5)
    table.speed(other, "decode", SMALL, 320, seed=3)
    assert other.prompts == engine.prompts


def test_prompts_and_requests_count_their_tokens() -> None:
    engine = FakeEngine("fake", seconds=0.0)
    assert table.speed(engine, "prompts", LARGE, 320, seed=0)[0] == 512
    speed, tokens = table.speed(engine, "requests", SMALL, 320, seed=0)
    assert speed == pytest.approx(sum(map(len, tokens)) / 32)


def test_tokens_are_equal_up_to_the_first_difference() -> None:
    assert table.equal_tokens([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == 0.5
    assert table.equal_tokens([[1, 2]], [[1, 2]]) == 1.0


def run_fakes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: table.Group, **engines: FakeEngine
) -> list[dict[str, Any]]:
    """Measure *group* with an engine for each name; one that is missing is not installed."""
    made = {OPWEAVE: engines["own"], "vLLM": engines.get("peer")}
    pythons = {name: Path(name) if engine else "no wheel" for name, engine in made.items()}
    monkeypatch.setattr(table, "start", lambda engine, *_: made[engine])
    models = Models("tiny", print, tmp_path)
    with progress(quiet=True) as bar:
        return list(table.measure(group, models, pythons, 2, bar))


GROUP = table.groups(["requests", "prompts"], [1], ["vLLM"])[0]


def test_a_ratio_above_1_is_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, peer = FakeEngine("opweave 1", 1.0), FakeEngine("vLLM 2", 2.0)
    requests, prompts = run_fakes(monkeypatch, tmp_path, GROUP, own=own, peer=peer)
    assert (requests["name"], prompts["name"]) == ("peers.requests", "peers.prompts")
    assert (prompts["value"], prompts["baseline"], prompts["ratio"]) == (256.0, 170.7, 1.5)
    assert (prompts["against"], prompts["equal_tokens"]) == ("vLLM 2", 1.0)
    assert own.prompts == peer.prompts
    assert own.closed
    assert peer.closed


def test_an_engine_that_fails_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, peer = FakeEngine("opweave 1", 1.0), FakeEngine("vLLM 2", 2.0, answers=4)
    requests, prompts = run_fakes(monkeypatch, tmp_path, GROUP, own=own, peer=peer)
    assert requests["ratio"] > 1
    assert prompts["not_measured"] == "vLLM 2 has stopped"
    assert "ratio" not in prompts
    requests, _ = run_fakes(monkeypatch, tmp_path, GROUP, own=own)
    assert requests["not_measured"] == "no wheel"


def test_opweave_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = FakeEngine("opweave 1", 1.0, answers=1)
    with pytest.raises(WorkerError, match="opweave 1 has stopped"):
        run_fakes(monkeypatch, tmp_path, GROUP, own=own, peer=FakeEngine("vLLM 2", 2.0))


def test_scaling_compares_an_engine_with_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = table.groups(["scaling"], [1, 2], ["vLLM"])[0]

    def start(engine: str, *arguments: Any) -> FakeEngine:
        return FakeEngine(engine, 1.0 / arguments[-1] if engine == OPWEAVE else 1.0)

    monkeypatch.setattr(table, "start", start)
    pythons = {OPWEAVE: Path("a"), "vLLM": Path("b")}
    with progress(quiet=True) as bar:
        rows = list(table.measure(group, Models("tiny", print, tmp_path), pythons, 1, bar))
    scaling = {row["engine"]: row["ratio"] for row in rows if row["name"] == "peers.scaling"}
    assert scaling == {OPWEAVE: 2.0, "vLLM": 1.0}


# The report


def test_lines_have_the_figures_or_the_reason() -> None:
    assert report.line(ROW).endswith(
        "float32, 1 thread(s): opweave 400, vLLM 0.32.0 200 tokens/s, ratio 2.01, "
        "100% of the tokens equal"
    )
    assert report.line(FAILED).endswith("OpenVINO not measured: no wheel | here")
    assert "vLLM 300, vLLM 0.32.0, 1 thread(s) 200 tokens/s, ratio 1.5" in report.line(SCALING)


def test_the_page_has_a_line_for_each_row() -> None:
    page = report.markdown([ROW, FAILED, SCALING], MACHINE, "python benchmarks/peers.py")
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert rows[0].endswith("| float32 | 1 | 400 | vLLM 0.32.0 | 200 | 2.01 | 100% |")
    assert "OpenVINO not measured: no wheel \\| here" in rows[1]
    assert rows[2].startswith("| scaling: ")
    assert "(300)" in rows[2]
    assert len(rows) == 3


def test_the_picture_has_a_chart_for_each_load() -> None:
    decode = {**ROW, "name": "peers.decode", "baseline": 800.0}
    picture = report.draw([ROW, FAILED, SCALING, decode], MACHINE)
    texts = ["".join(each.itertext()) for each in ElementTree.fromstring(picture).iter()]
    for title in ("Decode, one request", "32 requests at once"):
        assert texts.count(title) == 1
    assert texts.count("400 tokens/s") == 2  # opweave once in each cluster
    assert "200 tokens/s  (opweave 2.00x)" in texts
    assert "800 tokens/s  (opweave 0.50x)" in texts
    assert texts.count("not measured") == 1
    assert "Decode, one request" not in report.draw([ROW], MACHINE)


# The processes

ECHO = """
import json, sys
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request == "fail":
        raise ValueError("no such request")
    if request == "wait":
        import time
        time.sleep(60)
    print(json.dumps(request), flush=True)
"""


@contextmanager
def worker(script: str, **timeouts: float) -> Iterator[Worker]:
    process = Worker([sys.executable, "-c", script], {}, "the engine", **timeouts)
    try:
        yield process
    finally:
        process.close()


def test_a_worker_answers() -> None:
    with worker(ECHO) as process:
        assert process.greeting == "ready"
        assert process.ask({"prompts": [[1]]}) == {"prompts": [[1]]}


def test_a_worker_that_stops_reports_its_error() -> None:
    with (
        worker(ECHO) as process,
        pytest.raises(
            WorkerError,
            match=r"^the engine has stopped with status 1: ValueError: no such request$",
        ),
    ):
        process.ask("fail")


def test_a_worker_that_does_not_answer_is_ended() -> None:
    with worker(ECHO, timeout=0.5) as process:
        _ = process.greeting
        with pytest.raises(WorkerError, match=r"did not answer within 0\.5 s"):
            process.ask("wait")


def test_a_worker_without_a_program_is_an_error() -> None:
    with pytest.raises(WorkerError, match="no/such/python cannot be run: No such file"):
        Worker(["no/such/python"], {}, "the engine")


@pytest.mark.parametrize(("text", "error"), [
    ("", "no message"),
    ("x\nkilled\n", "killed"),
    ("Traceback:\n  at\nRuntimeError: no AMX\n[W1129] shut down", "RuntimeError: no AMX"),
    ("[rank0]: torch.cuda.OutOfMemoryError: full\n", "torch.cuda.OutOfMemoryError: full"),
])  # fmt: skip
def test_the_last_error_is_that_of_an_exception(text: str, error: str) -> None:
    assert last_error(text) == error


# The environments


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The commands of an installation, which are recorded and not run."""
    recorded: list[tuple[str, ...]] = []

    def record(*command: str, variables: object = None) -> None:
        recorded.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)

    monkeypatch.delenv("LLAMA_CPP_PYTHON", raising=False)
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "_run", record)
    return recorded


@pytest.mark.parametrize("peer", table.PEERS)
def test_an_engine_is_installed_once(
    peer: str, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    python = environments.install(peer, notes.append)
    assert python.parent.name == "bin"
    assert [note.startswith(f"installing {peer}") for note in notes] == [True]
    assert "--constraint" in commands[-1]
    count = len(commands)
    assert environments.install(peer, notes.append) == python
    assert len(commands) == count


def test_llama_cpp_may_be_installed_elsewhere(
    commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP_PYTHON", "/elsewhere/python")
    assert environments.install("llama.cpp", print) == Path("/elsewhere/python")
    assert commands == []


def test_a_failed_installation_is_one_line() -> None:
    script = "import sys; sys.exit('× no wheel\\n  ╰─▶ build it\\n' + 99 * 'a log\\n')"
    with pytest.raises(WorkerError, match=r"^installation failed: × no wheel ╰─▶ build it .* …$"):
        environments._run(sys.executable, "-c", script)


# The program


@pytest.mark.parametrize(("arguments", "message"), [
    (("--rounds", "0"), "--rounds must be at least 1"),
    (("--threads", "1", "0"), "--threads must be at least 1"),
    (("--rows", "speed"), "speed"),
    (("--engines", "ollama"), "ollama"),
])  # fmt: skip
def test_bad_options_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        peers.main(list(arguments))
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert message in captured.err


def install_here(peer: str, _: Callable[[str], object]) -> Path:
    if peer != "transformers":
        raise WorkerError("installation failed: no wheel")
    return Path(sys.executable)


@pytest.mark.slow
def test_opweave_and_transformers_generate_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their real workers, both in this environment."""
    monkeypatch.setattr(peers, "install", install_here)
    monkeypatch.setattr(peers, "Models", lambda size, note: Models(size, note, tmp_path / "models"))
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    monkeypatch.setattr(peers, "PICTURE", tmp_path / "peers.svg")
    options = ["--size=tiny", "--rows", "requests", "prompts", "--threads=1", "--rounds=1"]
    engines = ["--engines", "transformers", "OpenVINO"]
    assert peers.main([*options, *engines, "--json", "--save"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert json.loads((tmp_path / "peers.json").read_text())["rows"] == rows
    for row in rows:
        if row["engine"] == "OpenVINO":
            assert row["not_measured"] == "installation failed: no wheel"
        else:
            assert row["ratio"] > 0
            assert row["equal_tokens"] > 0
            assert row["equal_tokens"] == 1 or row["weights"] == "bfloat16"
    assert {row["name"] for row in rows} == {"peers.requests", "peers.prompts"}
    assert (tmp_path / "peers.md").read_text().count("\n| ") == len(rows) + 1
    assert (tmp_path / "peers.svg").read_text().startswith("<svg")
