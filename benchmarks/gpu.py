"""Values, decoding, prompt attention, norms and libraries on a GPU, the most important rows first.

    python benchmarks/gpu.py                       10 minutes
    python benchmarks/gpu.py --budget 300          the rows that fit into 5 minutes
    python benchmarks/gpu.py --only decode norms   these groups
    python benchmarks/gpu.py --dry-run             the rows and their expected time; needs no GPU
    python benchmarks/gpu.py --save                also writes results/gpu.md and .json

Each row is printed, and saved, as soon as it is measured. `ratio` is how much faster opweave is
than the baseline.

- values: the results of every provider against the definition, for some arguments of each op;
  `opweave verify` checks thoroughly.
- decode: tokens per second of Llama-3.2-1B's shape in bfloat16, compiled, against transformers
  compiled with a static cache and CUDA graphs. The limit is reading every weight once a step.
- attention: a prompt over the paged cache, against scaled_dot_product_attention.
- norms, libraries, kernels: each implementation of an op against the faster of its definition in
  eager torch and that compiled by Inductor. Device time by events, the last cache emptied before
  each call (``triton.testing.do_bench``); `host_us` is the host's time for a call. The limit is a
  copy of the same size.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, StaticCache

from engine_cells.models import NAMES, SINGLE, their_model, write_config
from engine_cells.single import random_tokens, read_bytes, timed
from harness import (
    Parser,
    as_json,
    copy_speed,
    describe_machine,
    device_time,
    host_time,
    out,
    print_json,
    run,
    significant,
)
from kernel_cells.cases import CASES
from kernel_cells.cell import Cell, dynamic_dims
from kernel_cells.contenders import torch_baseline
from kernel_cells.shape import Shape
from opweave import ir
from opweave.config import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    EngineConfig,
    SchedulerConfig,
)
from opweave.conformance import Subject
from opweave.conformance.checks.values import is_right
from opweave.conformance.inputs import of_tokens, usual, with_accepted_sizes
from opweave.ir.errors import described, did_you_mean
from opweave.ir.ops.arguments import with_noted_lengths
from opweave.ir.schema import OWN_PROVIDERS
from opweave_engine import EngineCore, RequestOutput, SamplingParams

Row = dict[str, Any]
Call = Callable[[], Any]

RESULTS = Path(__file__).parent / "results"
GROUPS = ("values", "decode", "attention", "norms", "libraries", "kernels")
BATCHES = (1, 8, 64)
PROMPTS = (512, 4096)
NORMS = ("rms_norm", "fused_add_rms_norm")
PAGED = ("paged_attention", "mla_attention_decode")
SHAPES = ((16, 0), (2048, 0), (8192, 0))
"""Tokens of 4,096 numbers."""
ATTENTION_SHAPES = ((1, 8192), (16, 2048), (64, 2048))
"""Tokens, one of each sequence, and the keys that each sees."""
HIDDEN = 4096
PROMPT_TOKENS, DECODED_TOKENS = 128, 64
_ROUNDS = 3
_WARM_UPS = 2  # the second compiles what depends on a first one's sizes
_BLOCK_SIZE = 64  # tokens
_DTYPES = 2  # of values: float32 and bfloat16
_SECONDS = {
    "values": 2.0, "decode": 120.0, "attention": 20.0, "norms": 10.0, "libraries": 10.0,
    "kernels": 10.0,
}  # fmt: skip
"""Expected time of a row of each group."""


@dataclass(frozen=True)
class Task:
    """Rows that are measured together: ``decode/8``."""

    name: str
    measure: Callable[[], Iterator[Row]]

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def seconds(self) -> float:
        return _SECONDS[self.group]


def tasks(device: str, size: str) -> list[Task]:
    """Return every task, the most important first."""
    hidden = HIDDEN if size == "full" else 256
    return [
        *(Task(f"values/{op.name}", partial(values, op, device)) for op in _verified_ops()),
        *(Task(f"decode/{n}", partial(decode, n, device, size)) for n in BATCHES),
        *(Task(f"attention/{n}", partial(attention, n, device, hidden)) for n in PROMPTS),
        *(
            Task(f"{group}/{name}/{shape.tokens}", partial(kernels, name, shape, device))
            for group, name in _ops()
            for shape in _shapes(name, hidden)
        ),
    ]


def _shapes(op: str, hidden: int) -> list[Shape]:
    sizes = ATTENTION_SHAPES if CASES[op][0].attends else SHAPES
    return [Shape(tokens, hidden, torch.bfloat16, context) for tokens, context in sizes]


def _ops() -> list[tuple[str, str]]:
    """Return the ops with implementations for a GPU by group: of libraries, or in Triton."""
    registry = ir.current_registry()
    registry.ensure_ready()
    groups = {}
    for name in CASES:
        providers = {impl.base for impl in registry.op(name).impls.values() if impl.supported}
        if providers - {*OWN_PROVIDERS, "native"}:
            groups[name] = "libraries"
        elif "triton" in registry.op(name).impls:
            groups[name] = "kernels"
    groups |= dict.fromkeys(NORMS, "norms")
    return sorted(((g, n) for n, g in groups.items()), key=lambda each: GROUPS.index(each[0]))


# Values.


def _verified_ops() -> list[ir.IrOp]:
    """Return the ops with implementations for a GPU; attention over the paged cache comes first."""
    ops = [op for op in ir.current_registry().ops.values() if _providers(op)]
    return sorted(ops, key=lambda op: (op.name not in PAGED, op.name != PAGED[0], op.name))


def _providers(op: ir.IrOp) -> list[str]:
    """Return the providers of *op* that are neither native nor for the CPU only."""
    names = {impl.base: None for impl in op.impls.values()}
    return [name for name in names if name != "native" and not name.startswith("opweave_c")]


def values(op: ir.IrOp, device: str) -> Iterator[Row]:
    """Yield a row for each provider: how many calls were right, or what was wrong."""
    for provider in _providers(op):
        if not op.impls[provider].supported:
            continue
        row: Row = {"name": "gpu.values", "case": f"{op.name}, {provider}"}
        subject = with_accepted_sizes(Subject(op, provider, device))
        if subject is None:
            yield {**row, "value": 0, "unit": "calls: it accepts none of the arguments"}
            continue
        cases = [
            case
            for case in (*usual(subject, _DTYPES), *of_tokens(subject, 2))
            if case.refusal is None and subject.accepts(case.values)
        ]
        problems = [f"{problem}: {case}" for case in cases if (problem := is_right(subject, case))]
        if problems:
            yield {**row, "error": problems[0]}
        else:
            yield {**row, "value": len(cases), "unit": "calls right"}


# Decoding.


class Opweave:
    """The engine, which decodes *batch* random prompts together."""

    def __init__(self, path: Path, batch: int, prompt: int, tokens: int, *, compiled: bool) -> None:
        mode = CompilationMode.OPWEAVE_COMPILE if compiled else CompilationMode.NONE
        length = prompt + tokens + 1
        blocks = batch * -(-length // _BLOCK_SIZE) + 1
        config = EngineConfig(
            dtype="bfloat16",
            load_format="dummy",
            compilation_config=CompilationConfig(mode=mode),
            cache=CacheConfig(_BLOCK_SIZE, blocks, enable_prefix_caching=False),
            scheduler=SchedulerConfig(batch, max(batch, batch * prompt), length),
        )
        self._core, self._names = EngineCore(path, config), itertools.count()
        self._batch, self._prompt, self._tokens = batch, prompt, tokens
        model = self._core.executor.worker.runner.model
        self.read_bytes, self._vocab_size = read_bytes(model), model.vocab_size

    def steps(self) -> list[float]:
        """Return the seconds of each step; the first one computes the prompts."""
        params = SamplingParams(temperature=0, max_tokens=self._tokens, ignore_eos=True)
        for _ in range(self._batch):
            tokens = random_tokens(self._prompt, self._vocab_size)
            request = self._core.prepare(str(next(self._names)), tokens, params, streams=False)
            self._core.add_request(request)
        times = []
        outputs: list[RequestOutput] = []
        while self._core.has_unfinished:
            times.append(timed(lambda: outputs.extend(self._core.step())))
        return times


class Transformers:
    """transformers' model, which reads each token back as its ``generate`` does.

    Compiled, it decodes with a static cache and CUDA graphs; prompts run op by op, as in
    ``generate``.

    Attributes:
        answers: the tokens of the last batch.
    """

    def __init__(
        self, path: Path, batch: int, prompt: int, tokens: int, device: str,
        *, dtype: torch.dtype = torch.bfloat16, backend: str | None = "inductor",
    ) -> None:  # fmt: skip
        with torch.device(device):
            self._model = their_model(path, dtype)
        self._batch, self._prompt, self._tokens, self._device = batch, prompt, tokens, device
        self._cache: Any = None
        self._decode: Callable[..., Any] = self._model
        if backend is not None:
            self._cache = StaticCache(self._model.config, max_cache_len=prompt + tokens + 1)
            # CUDA graphs: only Inductor has this mode.
            mode = "reduce-overhead" if device == "cuda" and backend == "inductor" else None
            self._decode = torch.compile(
                self._model.forward, backend=backend, mode=mode, fullgraph=True, dynamic=False
            )

    @torch.inference_mode()
    def steps(self) -> list[float]:
        """Return the seconds of each step; the first one computes the prompts."""
        vocab_size = self._model.config.vocab_size
        prompts = [random_tokens(self._prompt, vocab_size) for _ in range(self._batch)]
        self._next = torch.tensor(prompts, device=self._device)
        self._past = self._cache or DynamicCache(config=self._model.config)
        if self._cache is not None:
            self._cache.reset()
        self._position = 0
        self.answers: list[list[int]] = [[] for _ in prompts]
        times = [timed(lambda: self._step(self._model))]
        for _ in range(self._tokens - 1):
            torch.compiler.cudagraph_mark_step_begin()
            times.append(timed(lambda: self._step(self._decode)))
        return times

    def _step(self, model: Callable[..., Any]) -> None:
        count = self._next.shape[1]
        positions = torch.arange(self._position, self._position + count, device=self._device)
        logits = model(
            input_ids=self._next,
            position_ids=positions[None],
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._next = logits[:, -1:].argmax(-1).clone()
        for answer, tokens in zip(self.answers, self._next.tolist(), strict=True):
            answer.extend(tokens)
        self._position += count


def decode(
    batch: int, device: str, size: str, *, tokens: int = DECODED_TOKENS, compiled: bool = True
) -> Iterator[Row]:
    """Yield the tokens per second of a batch, in a row for the engine against transformers."""
    with tempfile.TemporaryDirectory() as folder:
        # A shorter context than the model's, for smaller tables of rotary embeddings.
        path = write_config(
            Path(folder) / "model", {**SINGLE[size], "max_position_embeddings": 8192}
        )
        sizes = (path, batch, PROMPT_TOKENS, tokens)
        theirs = _step_seconds(
            Transformers(*sizes, device, backend="inductor" if compiled else None)
        )
        model = Opweave(*sizes, compiled=compiled)
        ours = _step_seconds(model)
    bandwidth = copy_speed(device, 2**30 if size == "full" else 2**20) * 1e9
    yield {
        "name": "gpu.decode",
        "case": f"{NAMES[size]}, bfloat16, batch {batch}, {PROMPT_TOKENS} + {tokens} tokens",
        "value": significant(batch / ours),
        "unit": "tokens/s",
        "baseline": significant(batch / theirs),
        "against": "transformers" + ", compiled" * compiled,
        "ratio": significant(theirs / ours, 3),
        "limit_share": significant(model.read_bytes / bandwidth / ours, 3),
    }


def _step_seconds(model: Opweave | Transformers) -> float:
    for _ in range(_WARM_UPS):
        model.steps()
    return statistics.median(statistics.median(model.steps()[2:]) for _ in range(_ROUNDS))


# Attention over a prompt.


def attention(tokens: int, device: str, hidden: int) -> Iterator[Row]:
    """Yield a row for each implementation of attention over one prompt in a paged cache."""
    cell = Cell("paged_attention", 0, Shape(tokens, hidden, torch.bfloat16, tokens), 1)
    arguments = _on_device(cell, device)
    query, keys, values = arguments[0], *map(_gathered, arguments[1:3])

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
        )

    calls = _implementations(cell, arguments) | {"default": lambda: cell.op(*arguments)}
    yield from _rows(
        calls, {"sdpa": sdpa}, device,
        name="gpu.attention",
        case=f"{tokens} tokens, {query.shape[1]} heads of {query.shape[2]}, bfloat16",
    )  # fmt: skip


def _gathered(cache: Tensor) -> Tensor:
    """Return the keys of a cache of blocks, (blocks, heads, size, width), as one sequence."""
    return cache.transpose(0, 1).flatten(1, 2)[None].contiguous()


# Kernels.


_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def kernels(op: str, shape: Shape, device: str, *, backend: str = "inductor") -> Iterator[Row]:
    """Yield a row for each case of an op and each implementation but its definition."""
    for index in range(len(CASES[op])):
        yield from _kernel(Cell(op, index, shape, 1), device, backend)


def _kernel(cell: Cell, device: str, backend: str) -> Iterator[Row]:
    arguments = _on_device(cell, device)
    plain = torch_baseline(cell)
    if cell.family not in _compiled:
        torch._dynamo.reset()
        _compiled[cell.family] = torch.compile(plain, backend=backend)
    compiled = _compiled[cell.family]
    if cell.shape.tokens > 1:
        for value, dims in zip(arguments, dynamic_dims(cell), strict=True):
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(value, dim)
    baselines: dict[str, Call] = {
        "eager": lambda: plain(*arguments),
        "inductor": lambda: compiled(*arguments),
    }
    result = cell.op.native(*arguments)
    outputs = [result] if isinstance(result, Tensor) else list(result or ())
    yield from _rows(
        _implementations(cell, arguments), baselines, device,
        name=f"gpu.{cell.name}",
        case=str(cell).removesuffix(", 1 thread"),
        traffic=sum(cell.case.traffic(arguments, outputs)),
    )  # fmt: skip


def _implementations(cell: Cell, arguments: tuple[Any, ...]) -> dict[str, Call]:
    """Return a call of each implementation that supports *arguments*."""
    bound = cell.op.bind(*arguments)
    calls: dict[str, Call] = {}
    for name, impl in cell.op.impls.items():
        if name != "native" and impl.supported and impl.rejection(bound) is None:
            op = cell.op.using(f"{name}!")
            calls[name] = partial(op.maybe_inplace if impl.inplace else op, *arguments)
    return calls


def _rows(
    calls: dict[str, Call],
    baselines: dict[str, Call],
    device: str,
    *,
    name: str,
    case: str,
    traffic: int | None = None,
) -> Iterator[Row]:
    contenders = {**baselines, **calls}
    device_us: dict[str, list[float]] = {contender: [] for contender in contenders}
    host_us: dict[str, float] = {}
    with torch.inference_mode():
        for call in contenders.values():
            call()
        for _ in range(_ROUNDS):
            for contender, call in contenders.items():
                device_us[contender].append(device_time(call, device))
        for contender in calls:
            host_us[contender] = host_time(contenders[contender], device)
    us = {contender: statistics.median(times) for contender, times in device_us.items()}
    against = min(baselines, key=us.__getitem__)
    limit = None if traffic is None else traffic / copy_speed(device, 2**27) / 1e3
    for contender in calls:
        yield {
            "name": name,
            "case": f"{case}, {contender}",
            "value": significant(us[contender]),
            "unit": "us",
            "baseline": significant(us[against]),
            "against": against,
            "ratio": significant(us[against] / us[contender], 3),
            "host_us": significant(host_us[contender]),
            **({} if limit is None else {"limit_share": significant(limit / us[contender], 3)}),
        }


def _on_device(cell: Cell, device: str) -> tuple[Any, ...]:
    """Return the arguments of *cell*, with the lengths of sequences noted as an engine does."""
    moved = tuple(a.to(device) if isinstance(a, Tensor) else a for a in cell.inputs())
    return with_noted_lengths(cell.op.schema.names, moved)


# The program.


COLUMNS = ("name", "case", "value", "unit", "baseline", "against", "ratio", "limit_share")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="gpu.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", type=float, default=600.0, help="seconds (default: 600)")
    parser.add_argument("--only", nargs="+", default=[], help="groups or rows, as decode/8")
    parser.add_argument("--dry-run", action="store_true", help="print the rows, without a GPU")
    parser.add_argument("--check", action="store_true", help="only check the options and the GPU")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    parser.add_argument("--save", action="store_true", help="write results/gpu.*")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="of the models")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    if not options.budget > 0:
        parser.error(f"--budget {options.budget:g} must be above zero")
    chosen = tasks(options.device, options.size)
    for name in options.only:
        names = {*GROUPS, *(task.name for task in chosen)}
        if not any(each == name or each.startswith(f"{name}/") for each in names):
            parser.error(f"--only: unknown group or row {name!r}. {did_you_mean(name, names)}")
    if options.only:
        prefixes = tuple(f"{name}/" for name in options.only)
        chosen = [task for task in chosen if f"{task.name}/".startswith(prefixes)]
    if options.dry_run:
        for task in chosen:
            out.print(f"{task.name}  {task.seconds:g} s", markup=False)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --dry-run prints the rows")
    if options.check:
        return 0
    machine = describe_machine()
    if options.device == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name()}
    rows: list[Row] = []
    missed: list[str] = []
    for task in chosen:
        if time.monotonic() - start + task.seconds > options.budget:
            missed.append(task.name)
            continue
        for row in _measured(task):
            rows.append(row)
            if not options.json:
                print(_line(row), flush=True)
            if options.save:
                save(machine, rows)
    if options.json:
        print_json(machine, rows, missed=missed)
    elif missed:
        print(f"{len(missed)} did not fit into the budget: {' '.join(missed)}")
    return int(any("error" in row for row in rows))


def _measured(task: Task) -> Iterator[Row]:
    """Yield the rows of *task*, or the error that it ends with, and free its memory."""
    try:
        yield from task.measure()
    except Exception as error:  # the next rows may still be measured
        yield {"name": f"gpu.{task.group}", "case": task.name, "error": described(error, 1)}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']}  {row['case']}: {row['error']}"
    if "ratio" not in row:
        return f"{row['name']}  {row['case']}: {row['value']:g} {row['unit']}"
    share = f", {row['limit_share']:.0%} of the limit" if "limit_share" in row else ""
    return (
        f"{row['name']}  {row['case']}: {row['value']:g} {row['unit']}, {row['ratio']:g} x "
        f"{row['against']}{share}"
    )


def save(machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write a page and the whole output."""
    (RESULTS / "gpu.json").write_text(as_json(machine, rows=rows), encoding="utf-8")
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    device = machine.get("gpu", machine["processor"])
    lines = [
        "# Benchmarks on a GPU",
        "",
        f"`{command}` on {time.strftime('%Y-%m-%d')}, {device}, torch {machine['torch']}.",
        "The whole output is in [gpu.json](gpu.json); [gpu.py](../gpu.py) explains each row.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(str(row.get(column, '')) for column in COLUMNS)} |" for row in rows),
    ]
    (RESULTS / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
