"""``opweave chat``: chat with a model in the terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unicodedata import category

from opweave.cli.options import Flag, RunOptions, check_utf8
from opweave.cli.output import CliError, err, print_text, show_error
from opweave_engine.cli.options import ModelOptions, SamplingOptions, TemplateVariables, loading_bar

if TYPE_CHECKING:
    from opweave_engine import LLM, RequestOutput, SamplingParams


# Ctrl-C that stops the current task instead of the program.


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; a second Ctrl-C raises as usual.

    The task polls this function at safe points. Main thread only.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, previous)


# The command.


_SAMPLING, _RUNNING, _OPTIONS = SamplingOptions(), ModelOptions(), RunOptions()
_HELP = "/reset clears the conversation; /exit or Ctrl-D quits; Ctrl-C stops an answer."


def chat(
    model: Path,
    /,
    *,
    system: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: TemplateVariables = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    sampling: SamplingOptions = _SAMPLING,
    running: ModelOptions = _RUNNING,
    options: RunOptions = _OPTIONS,
    json: Flag = False,
) -> None:
    """Chat with the model in a directory; answers are streamed.

    Each line is a message. /reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops an
    answer. Lines from a file or a pipe are answered in turn.

    Parameters
    ----------
    model
        A checkpoint's directory, a GGUF file, or the id of a repository on the Hugging Face hub.
    system
        The system message of the conversation.
    chat_template
        A Jinja file, the template itself, or the name of one of the checkpoint's templates, instead
        of the checkpoint's default.
    max_tokens
        Maximum number of tokens per answer. The default is the checkpoint's, else the rest of the
        context.
    temperature
        0 is greedy decoding; higher values are more random. The default is the checkpoint's, else
        0.7.
    json
        Print each answer as one line of JSON when it is complete.
    """
    from opweave_engine import LLM, Checkpoint
    from opweave_engine.chat.conversation import check_keywords, checked_variables, template_for

    defaults = running.defaults(model, max_tokens=None, temperature=0.7)
    params = sampling.params(defaults, max_tokens=max_tokens, temperature=temperature)
    options.apply()
    # Checked first: loading the model takes longer.
    template = template_for(Checkpoint(model), chat_template)
    variables = checked_variables(chat_template_kwargs)
    check_keywords(variables, template)
    config = running.config()
    with loading_bar(config) as loading:
        llm = LLM(model, config=config, progress=loading)
    render = partial(template.render, **variables)
    _Chat(llm, render, params, system, as_json=json).run()


class _Chat:
    """An ongoing conversation."""

    def __init__(
        self,
        llm: LLM,
        render: Callable[[list[dict[str, str]]], str],
        sampling: SamplingParams,
        system: str | None,
        *,
        as_json: bool,
    ) -> None:
        self._llm, self._render, self._sampling = llm, render, sampling
        self._as_json = as_json
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)

    def run(self) -> None:
        """Answer messages until the input ends."""
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        if is_terminal:
            err.print(_HELP)
        for line in _typed() if is_terminal else _piped():
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self._messages = list(self._beginning)
            elif text == "/help":
                err.print(_HELP)
            elif text:
                self._answer(text, goes_on=is_terminal)

    def _answer(self, text: str, *, goes_on: bool) -> None:
        from opweave_engine import EngineError

        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            check_utf8(text)
            answer = self._write(messages)
        except (CliError, EngineError) as error:
            if not goes_on:
                raise
            show_error(f"{error} /reset clears the conversation.")
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _write(self, messages: list[dict[str, str]]) -> str:
        """Stream an answer and return its text, which is partial if it was stopped."""
        prompt = self._render(messages)
        ids = self._llm.tokenizer.encode(prompt, add_special_tokens=False)
        shown, newest = "", None
        with interruptible() as is_interrupted:
            for newest in self._llm.stream(ids, self._sampling):
                text = newest.outputs[0].text
                if not self._as_json:
                    delta = text[len(shown) :]
                    sys.stdout.write(_harmless(delta) if sys.stdout.isatty() else delta)
                    sys.stdout.flush()
                shown = text
                if is_interrupted():
                    break
        if self._as_json and newest is not None:
            print_text(json.dumps(_to_json(newest), ensure_ascii=False))
        elif not self._as_json:
            print_text("")
        sys.stdout.flush()
        return shown


def _typed() -> Iterator[str]:
    """Yield lines from the keyboard, with readline's editing and history if available."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() uses it once it is there)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print_text("")
            return
        except KeyboardInterrupt:
            print_text("")
            err.print("/exit or Ctrl-D quits.")


def _piped() -> Iterator[str]:
    if sys.stdin is None:
        raise CliError("Cannot read messages from standard input: it is closed.")
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CliError(f"Line {number} of standard input is not UTF-8: {error}.") from error


def _harmless(text: str) -> str:
    """Replace control characters of the terminal."""
    return "".join("\ufffd" if category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _to_json(output: RequestOutput) -> dict[str, Any]:
    (answer,) = output.outputs
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason or "abort",
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
    }
