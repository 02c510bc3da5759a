"""``opweave bench serve``: drive a running server, and print how fast it answers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict

from cyclopts import App
from rich.markup import escape
from rich.table import Table

from opweave.cli.flag import Flag
from opweave.cli.load import Client, Load, Summary, summarise
from opweave.cli.output import out, print_json
from opweave.cli.progress import ProgressBar
from opweave.cli.tables import PlainTable

bench = App(name="bench", help="Measure a running server.", help_format="plaintext")

_TIMES = {
    "ttft": "time to first token",
    "itl": "between two events",
    "tpot": "per token after the first",
    "e2e": "whole answer",
}


@bench.command
def serve(
    url: str,
    /,
    *,
    model: str | None = None,
    requests: int = 100,
    rate: float = 4.0,
    prompt_length: int = 64,
    max_tokens: int = 64,
    ignore_eos: bool = True,
    vocab_size: int | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    api_key: str | None = None,
    json: Flag = False,
) -> int:
    """Send completions to an OpenAI-compatible server, at random times, and measure the answers.

    Requests arrive as a Poisson process: independently of each other, and of the answers. Exits
    with 1 if one failed.

    Parameters
    ----------
    url
        Of the server, such as http://127.0.0.1:8000.
    model
        The model to ask for. The default is the server's first.
    requests
        How many requests.
    rate
        How many arrive in a second, on average; inf sends all at once.
    prompt_length
        Words of a prompt. They are random, so that no prompt is in the server's cache.
    max_tokens
        The length of an answer.
    ignore_eos
        Ask for answers of exactly that length; a server may not know this field.
    vocab_size
        Send token ids below this number instead of words, to a model without a tokenizer.
    seed
        Decides the prompts, and when they are sent.
    timeout
        Seconds without a byte after which a request has failed.
    api_key
        The server's key, if it wants one.
    json
        Print JSON.
    """
    load = Load(requests, rate, prompt_length, max_tokens, ignore_eos, vocab_size, seed)
    client = Client(url, api_key=api_key, timeout=timeout)
    name, summary = asyncio.run(_measure(client, model, load))
    if json:
        given = {**asdict(load), "rate": "inf" if math.isinf(rate) else rate}  # JSON has none
        print_json({"url": client.url, "model": name, "load": given, **asdict(summary)})
    else:
        _print(client.url, name, summary)
    return 1 if summary.errors else 0


async def _measure(client: Client, model: str | None, load: Load) -> tuple[str, Summary]:
    async with client:
        name = model or await client.model()
        with ProgressBar("answers") as progress:
            return name, summarise(*await client.run(name, load, progress))


def _print(url: str, model: str, found: Summary) -> None:
    out.print(
        f"{url}, model {model}: {found.completed} answers in {found.seconds:.1f} s", markup=False
    )
    out.print(
        f"{found.request_throughput:.2f} requests/s; {found.output_throughput:.1f} tokens/s "
        f"generated, {found.total_throughput:.1f} with prompts"
    )
    out.print(f"tokens: {found.prompt_tokens} of prompts, {found.output_tokens} generated\n")
    if found.milliseconds:
        out.print(_table(found))
    for reason, count in found.errors.items():
        out.print(f"[bold red]{count} failed[/]: {escape(reason)}")


def _table(found: Summary) -> Table:
    columns = next(iter(found.milliseconds.values()))
    table = PlainTable("milliseconds", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, label in _TIMES.items():
        if name in found.milliseconds:
            values = found.milliseconds[name]
            table.add_row(f"{name}: {label}", *(f"{values[each]:.1f}" for each in columns))
    return table
