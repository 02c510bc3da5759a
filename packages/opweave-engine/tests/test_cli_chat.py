"""``opweave chat``, from a pipe and in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from opweave.cli import main
from opweave_engine import LLM, SamplingParams
from opweave_engine.cli.chat import _harmless
from support import ROOT

CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' }}{% endfor %}"
DEFAULTS = {"--chat-template": TEMPLATE, "--temperature": "0"}
# A shell's background job ignores Ctrl-C, and so would what it starts.
_IN_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from opweave.cli import main
main()
"""
Chat = Callable[..., tuple[int, str, str]]


def command(*arguments: str) -> list[str]:
    """Return the command line, with defaults for what *arguments* do not say."""
    defaults = {k: v for k, v in DEFAULTS.items() if k not in arguments}
    return [
        "chat",
        str(CHECKPOINT),
        *(each for pair in defaults.items() for each in pair),
        *arguments,
    ]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Run the command in this process; return its exit code and what it wrote."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(stdin: bytes, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit_:
            main(command(*arguments))
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CHECKPOINT)


def answers(llm: LLM, *messages: str, max_tokens: int = 8) -> list[str]:
    """Return the answers to messages that follow one another."""
    said: list[dict[str, str]] = []
    for message in messages:
        said.append({"role": "user", "content": message})
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        (output,) = llm.chat(said, params, chat_template=TEMPLATE)
        said.append({"role": "assistant", "content": output.outputs[0].text})
    return [each["content"] for each in said[1::2]]


def test_lines_are_a_conversation(chat: Chat, llm: LLM) -> None:
    code, out, _ = chat(b"Return the\n\n Set a\n/reset\nSet a\n/exit\nnever\n", "--max-tokens", "8")
    first, second = answers(llm, "Return the", "Set a")
    (anew,) = answers(llm, "Set a")
    assert anew != second
    assert (code, out) == (0, f"{first}\n{second}\n{anew}\n")


def test_json_lines(chat: Chat, llm: LLM) -> None:
    code, out, err = chat("Return ä\nSet\n".encode(), "--max-tokens", "5", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == answers(llm, "Return ä", "Set", max_tokens=5)
    assert all(0 < line["completion_tokens"] <= 5 for line in lines)
    assert lines[0]["prompt_tokens"] < lines[1]["prompt_tokens"]
    assert (code, err) == (0, "")


def test_variables_of_the_template(chat: Chat) -> None:
    template = "{{ messages[0].content }}{{ 'Return' if thinks is false else 'Set' }}{{ n }}"

    def answer(*arguments: str) -> str:
        options = ("--chat-template", template, "--max-tokens", "4", "--json", *arguments)
        _, out, _ = chat(b"Return\n", *options)
        return out

    plain = answer()
    changed = answer("--chat-template-kwargs.thinks=false", "--chat-template-kwargs.n", "-1 x")
    assert changed != plain
    assert answer("--chat-template-kwargs", '{"thinks": false, "n": "-1 x"}') == changed


def test_the_system_message_stays_after_a_reset(chat: Chat) -> None:
    _, out, _ = chat(b"a\n/reset\na\n", "--system", "Return the", "--json", "--max-tokens", "3")
    first, second = out.splitlines()
    assert first == second


@pytest.mark.parametrize(
    ("stdin", "arguments", "named"),
    [
        (b"\xff\n", (), "not UTF-8"),
        (b"x " * 400, (), "context is 256 tokens"),
        (b"x", ("--temperature", "-1"), "temperature=-1"),
        (b"x", ("--chat-template", "{% if %}"), "not valid Jinja"),
        (b"x", ("--chat-template", "{{ raise_exception('not so') }}"), "not so"),
        (b"x", ("--chat-template", "/nowhere.jinja"), "cannot be read"),
        (b"x", ("--chat-template-kwargs.think=1",), "'think' is not a variable of"),
        (b"x", ("--chat-template-kwargs", "[1]"), "JSON object"),
        (b"x", ("--chat-template-kwargs.tools=[]",), "cannot hold tools"),
    ],
)
def test_errors_are_one_line(
    stdin: bytes, arguments: tuple[str, ...], named: str, chat: Chat
) -> None:
    code, out, err = chat(stdin, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("opweave: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_model_that_has_no_template(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["chat", str(CHECKPOINT)])
    assert exit_.value.code == 2
    assert "no chat template" in capsys.readouterr().err


def test_answers_do_not_control_the_terminal() -> None:
    assert (
        _harmless("a\x1b[2J\r\x07\x9b\tb\n👩\u200d🚀é")
        == "a\ufffd[2J\ufffd\ufffd\ufffd\tb\n👩\u200d🚀é"
    )


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_TERMINAL, *command(*arguments)],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def read_until(
        self, wanted: str, *, seconds: float = 90, nudge: Callable[[], None] | None = None
    ) -> str:
        """Return what was written up to *wanted*; call *nudge* each second until then."""
        begin = time.monotonic()
        nudges = 0
        while not (found := re.search(wanted, self._seen)):
            passed = time.monotonic() - begin
            assert passed < seconds, f"{wanted!r} is not in {self._seen!r}"
            if nudge is not None and passed >= nudges:
                nudge()
                nudges += 1
            if select.select([self._ours], [], [], 0.2)[0]:
                self._seen += os.read(self._ours, 4096).decode(errors="replace").replace("\r", "")
        before, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal("--max-tokens", "200")
    yield opened
    opened.close()


def test_in_a_terminal(terminal: Terminal) -> None:
    assert "Ctrl-C stops an answer" in terminal.read_until("> ")
    # Python does not see a signal that comes just before it waits for the keyboard.
    terminal.read_until("/exit or Ctrl-D quits", nudge=terminal.interrupt)
    terminal.read_until("> ")
    terminal.type("Return the\n")
    terminal.read_until(r"Return the\n\S+ ")
    terminal.interrupt()
    terminal.read_until(r"\n> ")
    terminal.type("x " * 400 + "\n")
    refused = terminal.read_until(r"/reset clears the conversation\.")
    assert "opweave: The prompt has" in refused
    assert "Traceback" not in refused
    terminal.read_until("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(30) == 0
