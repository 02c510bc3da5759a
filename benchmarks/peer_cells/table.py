"""The table: which engines run which load, and the figures of each row."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from engine_cells.mixed import ANSWERS, PROMPTS, requests
from harness import WorkerError, interleaved, significant, within
from peer_cells.contenders import OPWEAVE, REQUESTS, Answer, Engine, start
from peer_cells.models import LARGE, NAMES, SMALL, Models

Row = dict[str, Any]
Pythons = Mapping[str, Path | str]
ROWS = ("requests", "decode", "prompts", "low-bit", "scaling")
PEERS = ("vLLM", "OpenVINO", "transformers", "llama.cpp")
_DENSE = ("vLLM", "OpenVINO", "transformers")
_PROMPT, _DECODE_PROMPT = 512, 16  # tokens
_STEPS = {SMALL: 64, LARGE: 16}  # tokens that a request decodes
_LOAD_SECONDS, _FEWEST_ROUNDS = 60.0, 2  # a load ends after this time, but not before these rounds


@dataclass(frozen=True)
class Comparison:
    """Opweave against an engine.

    Attributes:
        own: weights that opweave has, such as ``"q4_0"``.
        peer: the other engine.
        theirs: the weights that it has.
    """

    own: str
    peer: str
    theirs: str


@dataclass(frozen=True)
class Group:
    """Processes that run at the same time, and are measured in turns.

    Attributes:
        model: SMALL or LARGE.
        comparisons: what is compared.
        loads: what they compute: ``requests``, ``decode``, ``prompts``.
        threads: the numbers of threads; each engine has a process for each.
        scales: whether the most threads are compared with the fewest.
    """

    model: str
    comparisons: tuple[Comparison, ...]
    loads: tuple[str, ...]
    threads: tuple[int, ...]
    scales: bool = False


def groups(rows: Sequence[str], threads: Sequence[int], engines: Sequence[str]) -> list[Group]:
    """Return what to measure for *rows*; the large model runs with the most *threads* only."""
    numbers = tuple(sorted(set(threads)))
    most = numbers[-1:]
    scales = "scaling" in rows and len(numbers) > 1
    float32 = [
        *(["requests"] if "requests" in rows else []),
        *(["prompts"] if "prompts" in rows else []),
        *(["decode"] if scales else []),
    ]
    in_float32 = [*_DENSE, *(["llama.cpp"] if scales or "prompts" in rows else [])]
    planned = [
        Group(SMALL, _alike("float32", in_float32), tuple(float32), numbers, scales),
        Group(
            SMALL,
            _alike("bfloat16", _DENSE),
            ("requests",) if "requests" in rows else (),
            numbers,
        ),
        Group(
            LARGE,
            _alike("bfloat16", _DENSE),
            tuple(load for load in ("decode", "prompts") if load in rows),
            most,
        ),
        Group(
            LARGE,
            tuple(
                Comparison(own, "llama.cpp", theirs)
                for own, theirs in (("w4a16", "q4_0"), ("q4_0", "q4_0"), ("q4_k", "q4_k"))
            ),
            ("decode", "prompts") if "low-bit" in rows else (),
            most,
        ),
    ]
    chosen = [
        replace(group, comparisons=tuple(c for c in group.comparisons if c.peer in engines))
        for group in planned
    ]
    return [group for group in chosen if group.loads and group.comparisons]


def _alike(weights: str, peers: Sequence[str]) -> tuple[Comparison, ...]:
    return tuple(Comparison(weights, peer, weights) for peer in peers)


@dataclass
class Contender:
    """An engine with its answers; once it has failed, it is not asked again."""

    engine: Engine | None = None
    error: str = ""
    build: str = ""
    speeds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Return what *call* does; None after a failure, whose message is kept."""
        if self.error:
            return None
        try:
            return call()
        except WorkerError as error:
            self.error = str(error)
            return None


def speed(
    engine: Engine, load: str, model: str, vocabulary: int, seed: int
) -> tuple[float, list[list[int]]]:
    """Return the tokens per second of a load that is drawn from *seed*, and the tokens."""
    draw = random.Random(seed)
    if load == "requests":
        drawn = requests(REQUESTS, vocabulary, seed)
        counts = [request.max_tokens for request in drawn]
        answer = engine.generate([request.prompt for request in drawn], counts)
        return sum(counts) / answer.seconds, answer.tokens
    length = _PROMPT if load == "prompts" else _DECODE_PROMPT
    prompt = [draw.randrange(vocabulary) for _ in range(length)]
    first = engine.generate([prompt], [1])
    if load == "prompts":
        return length / first.seconds, first.tokens
    steps = _STEPS[model]
    answer = engine.generate([prompt], [steps + 1])
    return decode_speed(steps, first, answer), answer.tokens


def decode_speed(steps: int, first: Answer, answer: Answer) -> float:
    """Return the tokens per second after the first one, of *answer* with ``steps + 1`` tokens.

    A prompt takes as long as one step at least, and as one for each of its tokens at most. These
    limits matter where a disturbance is longer than the steps of a small model.
    """
    least, most = (answer.seconds * steps / (steps + n) for n in (_DECODE_PROMPT, 1))
    return steps / min(max(answer.seconds - first.seconds, least), most)


def measure(
    group: Group, models: Models, pythons: Pythons, rounds: int, bar: Progress
) -> Iterator[Row]:
    """Yield the rows of a group as they are measured.

    Args:
        group: what to measure.
        models: the files.
        pythons: a Python of each engine, or the reason why it is missing.
        rounds: the number of rounds, fewer if a load takes longer than a minute.
        bar: shows the progress.

    Raises:
        WorkerError: opweave cannot be run.
    """
    keys = [(OPWEAVE, c.own) for c in group.comparisons]
    keys += [(c.peer, c.theirs) for c in group.comparisons]
    contenders = {
        (engine, weights, threads): Contender()
        for engine, weights in dict.fromkeys(keys)
        for threads in group.threads
    }
    with ExitStack() as stack:
        for (engine, weights, threads), contender in contenders.items():
            _start(contender, engine, weights, threads, group, models, pythons)
            if contender.engine is not None:
                stack.callback(contender.engine.close)
        names = bar.track(contenders.items(), description="loading models")
        for (engine, _, _), contender in names:
            contender.build = contender.attempt(lambda c=contender: c.engine.build) or engine
        for load in group.loads:
            _run(load, group, contenders, models, rounds, bar)
            yield from rows(load, group, contenders, models.size)
        if group.scales:
            yield from scaling(group, contenders, models.size)


Key = tuple[str, str, int]


def _start(
    contender: Contender,
    engine: str,
    weights: str,
    threads: int,
    group: Group,
    models: Models,
    pythons: Pythons,
) -> None:
    python = pythons[engine]
    if isinstance(python, str):
        contender.error = python
        return
    contender.engine = contender.attempt(
        lambda: start(engine, python, models, group.model, weights, threads)
    )


def _run(
    load: str,
    group: Group,
    contenders: Mapping[Key, Contender],
    models: Models,
    rounds: int,
    bar: Progress,
) -> None:
    """Add the speeds and tokens of a load to the contenders that can run it."""
    vocabulary = models.vocabulary(group.model)

    def turn(contender: Contender) -> Callable[[], float]:
        seeds = iter(range(rounds + 1))
        contender.tokens[load] = []

        def once() -> float:
            seed = next(seeds)
            found = contender.attempt(
                lambda: speed(contender.engine, load, group.model, vocabulary, seed)
            )
            if found is None:
                return math.nan
            contender.tokens[load] += found[1]
            return float(found[0])

        return once

    able = {
        key: turn(contender)
        for key, contender in contenders.items()
        if not contender.error and (load != "requests" or key[0] != "llama.cpp")
    }
    for warm_up in bar.track(list(able.values()), description=f"{load}: first round"):
        warm_up()
    limited = within(rounds, fewest=min(rounds, _FEWEST_ROUNDS), least=0.0, most=_LOAD_SECONDS)
    for key, speeds in interleaved(
        able, bar.track(limited, total=rounds, description=load)
    ).items():
        contenders[key].speeds[load] = speeds


def rows(load: str, group: Group, contenders: Mapping[Key, Contender], size: str) -> Iterator[Row]:
    """Yield a row for each comparison and number of threads."""
    for threads in group.threads:
        for comparison in group.comparisons:
            if load == "requests" and comparison.peer == "llama.cpp":
                continue
            own = contenders[OPWEAVE, comparison.own, threads]
            if own.error:
                raise WorkerError(own.error)
            other = contenders[comparison.peer, comparison.theirs, threads]
            row = {
                "name": f"peers.{load}",
                "case": _case(load, group.model, size),
                "weights": comparison.own,
                "threads": threads,
                "engine": comparison.peer,
                "value": significant(statistics.median(own.speeds[load])),
                "unit": "tokens/s",
            }
            if other.error:
                yield row | {"not_measured": other.error}
                continue
            row |= {
                "baseline": significant(statistics.median(other.speeds[load])),
                "against": _against(other.build, comparison),
                "ratio": _ratio(own.speeds[load], other.speeds[load]),
            }
            if comparison.own in ("float32", "bfloat16"):
                row["equal_tokens"] = equal_tokens(own.tokens[load], other.tokens[load])
            yield row


def scaling(group: Group, contenders: Mapping[Key, Contender], size: str) -> Iterator[Row]:
    """Yield a row for each engine: decoding with the most threads over that with the fewest."""
    fewest, most = group.threads[0], group.threads[-1]
    for engine, weights in dict.fromkeys(key[:2] for key in contenders):
        few, many = (contenders[engine, weights, threads] for threads in (fewest, most))
        row = {
            "name": "peers.scaling",
            "case": _case("decode", group.model, size),
            "weights": weights,
            "threads": most,
            "engine": engine,
        }
        if error := few.error or many.error:
            yield row | {"not_measured": error}
            continue
        yield row | {
            "value": significant(statistics.median(many.speeds["decode"])),
            "unit": "tokens/s",
            "baseline": significant(statistics.median(few.speeds["decode"])),
            "against": f"{many.build}, {fewest} thread(s)",
            "ratio": _ratio(many.speeds["decode"], few.speeds["decode"]),
        }


def equal_tokens(own: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the share of the tokens that come before the first difference of their answers."""
    same = 0
    for one, other in zip(own, others, strict=True):
        differs = [a != b for a, b in zip(one, other, strict=True)]
        same += differs.index(True) if True in differs else len(differs)
    return significant(same / sum(map(len, own)), 3)


def _ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return significant(statistics.median(a / b for a, b in zip(own, other, strict=True)), 3)


def _against(build: str, comparison: Comparison) -> str:
    if comparison.own == comparison.theirs:
        return build
    return f"{build}, {comparison.theirs}"


def _case(load: str, model: str, size: str) -> str:
    name = NAMES[model, size]
    if load == "requests":
        sizes = f"{PROMPTS[0]} to {PROMPTS[1]} + {ANSWERS[0]} to {ANSWERS[1]} tokens"
        return f"{name}, {REQUESTS} requests at once, {sizes}"
    if load == "prompts":
        return f"{name}, a prompt of {_PROMPT} tokens"
    return f"{name}, decode, batch 1"
