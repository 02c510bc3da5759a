"""Weights of four bits: decoding and prefill, one request at a time."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig

from engine_cells.llama_cpp_contender import running
from engine_cells.llama_cpp_file import write_random_blocks
from engine_cells.models import LOW_BIT, NAMES, write_config
from engine_cells.single import CONTEXT, DTYPE, PREFILL, LlamaCpp, Ours, Row, read_bytes, row
from harness import interleaved, progress
from kernel_cells.stream import Stream
from opweave.layers.embedding import ParallelLMHead
from opweave.layers.linear import LinearBase
from opweave.layers.linear_methods import GroupedInt4Method
from opweave_engine.load import loader

FORMATS = ("q4_0", "q4_k")
_GROUP = 64
_READ = 1 << 30  # bytes


def int4(path: Path, steps: int) -> Ours:
    """Return the engine with random int4 weights, those of the head included."""
    ours = Ours(path, steps)
    make_int4(ours.model)
    return ours


def make_int4(model: nn.Module) -> None:
    """Give the linear layers and the head of *model* random int4 weights."""
    for layer in model.modules():
        if isinstance(layer, LinearBase | ParallelLMHead):
            _make_int4(layer)


def _make_int4(layer: LinearBase | ParallelLMHead) -> None:
    rows, columns = layer.weight.shape
    method = GroupedInt4Method(_GROUP, DTYPE)
    method.create_weights(layer, columns, [rows], columns, rows, DTYPE)
    loader.move_parameters(layer)
    layer.get_parameter("weight").data.random_(256)
    layer.get_parameter("scale").data.fill_(columns**-0.5 / 4.6)  # 4.6: deviation of -8 to 7
    layer.quant_method = method


def measure(size: str, steps: int, rounds: int, *, llama_cpp: str | None, quiet: bool) -> list[Row]:
    """Return the rows of decoding and prefill with weights of four bits.

    Args:
        llama_cpp: a Python that has it, if it is to be compared with, by the same GGUF files.
    """
    # The files have no tokenizer, because prompts are token ids; a warning says so for each.
    logging.getLogger("opweave_engine.tokenizer").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bar = stack.enter_context(progress(quiet=quiet))
        path = write_config(folder / "model", LOW_BIT[size])
        config = AutoConfig.from_pretrained(path)
        files = {
            format: write_random_blocks(folder / f"{format}.gguf", config, format)
            for format in FORMATS
        }
        own = {"w4a16": int4(path, steps), "bfloat16": Ours(path, steps)}
        own |= {name: Ours(file, steps, load_format="auto") for name, file in files.items()}
        stream = Stream(_READ, pieces=1, in_huge_pages=True)
        measures: dict[str, Callable[[], float]] = {"read": stream.read}
        for name, ours in own.items():
            measures |= {name: ours.decode, f"{name}, prefill": ours.prefill}
        build = ""
        for name, file in files.items() if llama_cpp is not None else ():
            process = stack.enter_context(
                running(str(llama_cpp), file, threads=threads, context=CONTEXT)
            )
            theirs, build = LlamaCpp(process, steps, config.vocab_size), process.build
            measures |= {
                f"llama.cpp, {name}": theirs.decode,
                f"llama.cpp, {name}, prefill": theirs.prefill,
            }
        for warm_up in measures.values():
            warm_up()
        found = interleaved(measures, bar.track(range(rounds), description="weights of four bits"))
    speed = statistics.median(found["read"]) * 1e9
    least = {name: read_bytes(each.model) / speed for name, each in own.items()}
    return list(_rows(f"{NAMES[size]}, {threads} thread(s), batch 1", found, least, build))


def _rows(
    case: str, found: Mapping[str, list[float]], least: Mapping[str, float], build: str
) -> Iterator[Row]:
    """Yield the rows; *found* and *least* are seconds, *build* says which llama.cpp ran, if any."""
    for name in ("w4a16", *FORMATS):
        contenders = {"": ("bfloat16", "opweave, bfloat16")}
        if build:
            theirs = name if name in FORMATS else FORMATS[0]
            contenders[".llama_cpp"] = (f"llama.cpp, {theirs}", f"llama.cpp, {theirs}")
        for suffix, (baseline, against) in contenders.items():
            described = f"{case}, {name} weights" + (f", {build}" if suffix else "")
            yield row(
                f"engine.low_bit.decode.{name}{suffix}",
                described,
                found[name],
                found[baseline],
                against,
                limit=least[name],
            )
            yield row(
                f"engine.low_bit.prefill.{name}{suffix}",
                f"{described}, {PREFILL} tokens",
                found[f"{name}, prefill"],
                found[f"{baseline}, prefill"],
                against,
                tokens=PREFILL,
            )
