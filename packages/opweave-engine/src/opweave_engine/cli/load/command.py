"""``opweave bench serve``: load-test a running server."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from opweave.cli.flag import Flag
from opweave.cli.output import out, print_json
from opweave.cli.progress import progress_bar
from opweave.cli.tables import PlainTable
from opweave_engine.cli.load import Client, Load, Summary, summarize

_TIMES = {
    "ttft": "time to first token",
    "itl": "between two events",
    "tpot": "per token after the first",
    "e2e": "whole answer",
}


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
    """Load-test an OpenAI-compatible server with completion requests.

    Requests arrive as a Poisson process, independently of the responses. Exits with 1 if a request
    failed.

    Parameters
    ----------
    url
        URL of the server, such as http://127.0.0.1:8000.
    model
        Name of the model. The default is the server's first model.
    requests
        Number of requests.
    rate
        Mean number of requests per second; inf sends all at once.
    prompt_length
        Words per prompt. They are random, so that prompts miss the server's prefix cache.
    max_tokens
        Tokens per answer.
    ignore_eos
        Ask for answers of exactly that length; not every server supports this field.
    vocab_size
        Send token ids below this number instead of words, for a model without a tokenizer.
    seed
        Seed of the prompts and arrival times.
    timeout
        Seconds without data after which a request fails.
    api_key
        API key of the server, if it requires one.
    json
        Print JSON.
    """
    load = Load(requests, rate, prompt_length, max_tokens, ignore_eos, vocab_size, seed)
    client = Client(url, api_key=api_key, timeout=timeout)
    name, summary = asyncio.run(_measure(client, model, load))
    if json:
        given = {**asdict(load), "rate": "inf" if math.isinf(rate) else rate}  # JSON has no inf
        print_json({"url": client.url, "model": name, "load": given, **asdict(summary)})
    else:
        _print(client.url, name, summary)
    return 1 if summary.errors else 0


async def _measure(client: Client, model: str | None, load: Load) -> tuple[str, Summary]:
    async with client:
        name = model or await client.model()
        with progress_bar("answers") as progress:
            return name, summarize(*await client.run(name, load, progress))


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
