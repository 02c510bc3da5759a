"""``opweave generate``: generate text with a checkpoint, and show the kernels that ran."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from opweave import ir
from opweave.cli.explain import selection_table, selections
from opweave.cli.options import Flag, RunOptions, check_utf8
from opweave.cli.output import CliError, out, print_json, print_text, progress_bar
from opweave_engine.cli.options import ModelOptions, SamplingOptions, loading_bar

if TYPE_CHECKING:
    from opweave_engine import RequestOutput

_SAMPLING, _RUNNING, _OPTIONS = SamplingOptions(), ModelOptions(), RunOptions()


def generate(
    model: Path,
    /,
    *,
    prompt: Annotated[list[str] | None, Parameter(negative=())] = None,
    prompt_file: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    prompt_token_ids: Annotated[list[str] | None, Parameter(negative=())] = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    add_special_tokens: bool = True,
    sampling: SamplingOptions = _SAMPLING,
    running: ModelOptions = _RUNNING,
    options: RunOptions = _OPTIONS,
    explain: Flag = False,
    json: Flag = False,
) -> None:
    """Generate text from one or more prompts.

    Parameters
    ----------
    model
        A checkpoint's directory, a GGUF file, or the id of a repository on the Hugging Face hub.
    prompt
        The prompt; repeatable, for a batch.
    prompt_file
        Read the prompt from this UTF-8 file, or from standard input if it is "-".
    prompt_token_ids
        The prompt as token ids, such as 1,17,4; repeatable. Needed for a model without a tokenizer.
    max_tokens
        Maximum number of tokens to generate. The default is the checkpoint's, else 64.
    temperature
        0 is greedy decoding; higher values are more random. The default is the checkpoint's, else
        0.
    add_special_tokens
        Add the tokenizer's special tokens to prompts.
    explain
        Show which kernel each op used, and why others were rejected.
    json
        Print JSON: prompt and token ids, text, timings and selections.
    """
    from opweave_engine import LLM

    prompts = _prompts(prompt, prompt_file, prompt_token_ids)
    defaults = running.defaults(model, max_tokens=64, temperature=0.0)
    params = sampling.params(defaults, max_tokens=max_tokens, temperature=temperature)
    options.apply_like_eager()
    config = running.config()
    with loading_bar(config) as loading:
        llm = LLM(model, config=config, progress=loading)
    recording = ir.record() if explain or json else nullcontext(ir.Record())
    with recording as record, progress_bar("writing") as writing:
        outputs = llm.generate(
            prompts, params, progress=writing, add_special_tokens=add_special_tokens
        )
    if json:
        print_json(_to_json(model, outputs, record))
    else:
        for output in outputs:
            print_text(f"{output.prompt or ''}{output.outputs[0].text}\n")
        if explain:
            out.print(selection_table(record))
    for output in outputs:
        if output.error is not None:
            raise output.error


def _prompts(
    texts: list[str] | None, file: str | None, ids: list[str] | None
) -> list[str] | list[list[int]]:
    count = sum(value is not None for value in (texts, file, ids))
    if not count:
        raise CliError(
            "Give a prompt: --prompt TEXT, --prompt-file FILE (- for standard input) or "
            "--prompt-token-ids 1,2,3."
        )
    if count > 1:
        raise CliError("Give one of --prompt, --prompt-file and --prompt-token-ids.")
    if ids is not None:
        return [_token_ids(text) for text in ids]
    if texts is None:
        return [_read(file or "-")]
    for text in texts:
        check_utf8(text)
    return texts


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CliError(
            f"--prompt-token-ids {text!r} is not a list of integers such as 1,17,4."
        ) from error


def _read(file: str) -> str:
    name = "standard input" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise CliError("Cannot read the prompt from standard input: it is closed.")
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8").rstrip("\n")
    except OSError as error:
        raise CliError(f"Cannot read the prompt from {name}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CliError(f"The prompt in {name} is not UTF-8: {error}.") from error


def _to_json(model: Path, outputs: list[RequestOutput], record: ir.Record) -> dict[str, Any]:
    return {
        "model": str(model),
        "outputs": [
            {
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "token_ids": output.outputs[0].token_ids,
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
                "error": None if output.error is None else str(output.error),
                "timings": asdict(output.timings),
            }
            for output in outputs
        ],
        "selections": selections(record),
    }
