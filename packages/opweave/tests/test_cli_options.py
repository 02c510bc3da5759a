"""Options shared by ``generate`` and ``chat``: sampling, the model, and progress."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from opweave.cli import main
from opweave.cli.output import err
from opweave.config import CompilationConfig, EngineConfig
from opweave.config.terminal import ProgressBar
from opweave_engine import (
    Checkpoint,
    EngineError,
    SamplingParams,
    StructuredOutputsParams,
    Tokenizer,
)
from opweave_engine.load.loader import after_loading, reporting
from support import ROOT

CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"
COMMANDS = {"generate": ["--prompt", "x"], "chat": ["--chat-template", "{{ messages[0].content }}"]}


@dataclass
class Told:
    """The arguments that a command passes to the engine."""

    config: EngineConfig = field(default_factory=EngineConfig)
    params: SamplingParams = field(default_factory=SamplingParams)
    add_special_tokens: bool = True


Run = Callable[..., Told]


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with an engine that takes note of what it is told, and then fails."""
    told = Told()

    class Notes:
        tokenizer = Tokenizer(Checkpoint(CHECKPOINT))

        def __init__(self, model: Path, *, config: EngineConfig, progress: Any) -> None:
            told.config = config
            progress(1, 2)
            progress(2, 2)

        def generate(
            self,
            prompts: Any,
            params: SamplingParams,
            progress: Any = None,
            add_special_tokens: bool = True,
        ) -> Any:
            told.params, told.add_special_tokens = params, add_special_tokens
            raise EngineError("enough")

        stream = generate

    def told_by(command: str, *options: str, model: Path = CHECKPOINT) -> Told:
        monkeypatch.setattr("opweave_engine.LLM", Notes)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
        with pytest.raises(SystemExit) as exit_:
            main([command, str(model), *COMMANDS[command], *options])
        assert exit_.value.code == 2
        return told

    return told_by


def test_sampling(run: Run, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(
        command, "--max-tokens=9", "--temperature=0.5", "--top-k=4", "--top-p=0.75", "--min-p=0.25",
        "--presence-penalty", "-1.5", "--frequency-penalty=1", "--repetition-penalty=1.25",
        "--seed=3", "--stop=a", "--stop", "b", "--stop-token-id=5", "--stop-token-id=6",
        "--min-tokens=2", "--ignore-eos", "--no-skip-special-tokens",
        "--no-spaces-between-special-tokens", "--include-stop-str-in-output",
        "--allowed-token-ids=7", "--allowed-token-ids=8", "--bad-words=x", "--bad-words", "y",
        "--truncate-prompt-tokens=-1",
    )  # fmt: skip
    assert capsys.readouterr().err.startswith("opweave: enough")
    assert told.params == SamplingParams(
        max_tokens=9, temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, presence_penalty=-1.5,
        frequency_penalty=1.0, repetition_penalty=1.25, seed=3, stop=("a", "b"),
        stop_token_ids=(5, 6), min_tokens=2, ignore_eos=True, skip_special_tokens=False,
        spaces_between_special_tokens=False, include_stop_str_in_output=True,
        allowed_token_ids=(7, 8), bad_words=("x", "y"), truncate_prompt_tokens=-1,
    )  # fmt: skip


def test_forms(run: Run, command: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    for options, form in [
        (["--json-schema", str(file)], {"json": '{"type": "null"}'}),
        (["--json-schema", '{"type": "null"}'], {"json": '{"type": "null"}'}),
        (["--regex=a+"], {"regex": "a+"}),
        (["--choice=a", "--choice", "b c"], {"choice": ["a", "b c"]}),
        (["--grammar", 'root ::= "a"'], {"grammar": 'root ::= "a"'}),
    ]:
        told = run(command, *options)
        assert told.params.structured_outputs == StructuredOutputsParams(**form)
    assert run(command).params.structured_outputs is None


def test_special_tokens_of_a_prompt(run: Run) -> None:
    assert run("generate").add_special_tokens
    assert not run("generate", "--no-add-special-tokens").add_special_tokens


def test_defaults(run: Run) -> None:
    assert run("generate").params == SamplingParams(max_tokens=64, temperature=0.0)
    assert run("chat").params == SamplingParams(max_tokens=None, temperature=0.7)


def test_defaults_of_the_checkpoint(run: Run, command: str, tmp_path: Path) -> None:
    given = {"temperature": 0.3, "top_k": 5, "max_new_tokens": 7, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    limits = {"max_tokens": 7, "repetition_penalty": 1.1}
    told = run(command, model=tmp_path)
    assert told.params == SamplingParams(temperature=0.3, top_k=5, **limits)
    told = run(command, "--temperature=0", "--top-k=0", model=tmp_path)
    assert told.params == SamplingParams(temperature=0.0, **limits)
    plain = run(command).params
    assert run(command, "--generation-config=none", model=tmp_path).params == plain
    told = run(command, "--generation-config", str(tmp_path))
    assert told.params == SamplingParams(temperature=0.3, top_k=5, **limits)
    assert told.config.generation_config == str(tmp_path)


def test_the_model(run: Run, command: str) -> None:
    told = run(
        command, "--dtype=bfloat16", "--load-format=dummy", "--tensor-parallel-size=2",
        "--cpu-threads=3",
    )  # fmt: skip
    config = told.config
    assert (config.dtype, config.load_format) == ("bfloat16", "dummy")
    assert (config.parallel.tensor_parallel_size, config.cpu_threads) == (2, 3)
    assert run(command).config == EngineConfig()


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--cpu-threads=0", "cpu_threads=0"),
        ("--cpu-threads=100000", "cpu_threads=100000 is more than"),
        ("--presence-penalty=3", "presence_penalty=3"),
        ("--min-p=2", "min_p=2"),
        ("--stop-token-id=-1", "stop_token_ids=-1"),
        ("--topk=3", "--top-k"),
        ("--regex=a --choice=b", "--regex and --choice are mutually exclusive"),
        ("--json-schema=missing.json", "--json-schema 'missing.json' cannot be read: No such file"),
        ("--grammar=missing", "--grammar 'missing' cannot be read"),
        ("--json-schema={", "structured_outputs: json is not valid JSON"),
        ("--load-format=foo", 'Choose from: "auto", "dummy"'),
    ],
)
def test_options_that_are_wrong(
    run: Run, command: str, option: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, *option.split())
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_a_terminal_shows_what_is_done(
    run: Run, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(command)
    assert "loading" not in capsys.readouterr().err
    monkeypatch.setattr(err, "_force_terminal", True)
    monkeypatch.setattr(err, "is_interactive", True)
    for option, then in (("mode=0", "warming up"), ("mode=3", "compiling")):
        run(command, f"--compilation-config.{option}")
        shown = capsys.readouterr()
        assert then in shown.err
        assert shown.out == ""


def drawn(*calls: tuple[int, int], is_terminal: bool = True) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80)
    with ProgressBar("loading", then="compiling", console=console) as bar:
        for call in calls:
            bar(*call)
    return file.getvalue()


def test_a_bar() -> None:
    assert "loading" in drawn()
    assert "1/2" in drawn((1, 2))
    assert "compiling" not in drawn((1, 2))
    for calls in ([(1, 2), (2, 2)], [(2, 2), (2, 2)]):
        assert re.search(r"compiling .*0/\?", drawn(*calls))
    assert drawn((1, 2), (2, 2), is_terminal=False) == ""


def test_what_a_program_asks_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    with reporting(lambda *call: calls.append(call), "writing") as report:
        assert report is not None
        report(1, 2)
    assert calls == [(1, 2)]
    for nothing in (None, False):
        with reporting(nothing, "writing") as report:
            assert report is None
    for is_terminal in (False, True):
        if is_terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        with reporting(True, "writing") as report:
            assert report is not None
            report(1, 2)
        assert ("writing" in capsys.readouterr().err) is is_terminal


def test_what_follows_loading() -> None:
    assert after_loading(None) == "warming up"
    compiling = EngineConfig(compilation_config=CompilationConfig(mode=3))
    assert after_loading(compiling) == "compiling"
