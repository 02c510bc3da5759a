"""Models of transformers, eager and compiled, with opweave and without.

    python benchmarks/any_model.py                     a table of all models
    python benchmarks/any_model.py --models smollm2    some of them
    python benchmarks/any_model.py --modes eager       without torch.compile, which takes minutes
    python benchmarks/any_model.py --json              one object

Random weights in the shapes of published models. Eager models are compared with
``opweave.optimize``, and compiled ones with ``torch.compile(backend="opweave")`` of the same
model. Both share their parameters, and rounds are interleaved: a figure is the median over rounds,
and `ratio` the median of the time without opweave over ours in the same round. Prefill runs one
prompt of 512 tokens; decode is the median step after a prompt of 16 tokens, for a batch of 1 or 8,
compiled with a static cache. Decode of compiled models with sliding windows is left out: their
static cache makes torch.compile recompile at each step. ResNet-50 has nothing that opweave
replaces or recognizes, and must not become slower; its cell is one image of 224 x 224.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from rich.table import Table
from torch import nn

import opweave
from harness import (
    Parser,
    describe_machine,
    interleaved,
    out,
    print_json,
    progress,
    run,
    significant,
)

PREFILL, PROMPT, STEPS = 512, 16, 8
DECODED = (1, 8)  # sequences
CELLS = ("prefill", *(f"decode/{batch}" for batch in DECODED), "image")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The shapes of https://huggingface.co/{meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B,
# google/gemma-3-270m, HuggingFaceTB/SmolLM2-135M, openai-community/gpt2,
# sentence-transformers/all-MiniLM-L6-v2, microsoft/resnet-50}.
MODELS: dict[str, Callable[[], Any]] = {
    "llama-1b": lambda: transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": lambda: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "gemma3-270m": lambda: transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, tie_word_embeddings=True,
    ),
    "smollm2": lambda: transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "gpt2": transformers.GPT2Config,
    "minilm": lambda: transformers.BertConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12,
    ),
    "resnet-50": transformers.ResNetConfig,
    "tiny": lambda: transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    ),
}  # fmt: skip
PUBLISHED = [name for name in MODELS if name != "tiny"]


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model with random weights."""
    whole = name not in ("minilm", "resnet-50")
    kind = transformers.AutoModelForCausalLM if whole else transformers.AutoModel
    torch.manual_seed(0)
    return kind.from_config(MODELS[name](), dtype=dtype).eval()


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of *model* that shares its parameters."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def optimized(model: nn.Module) -> nn.Module:
    twin = twin_of(model)
    opweave.optimize(twin)
    return twin


def compiled(model: nn.Module, backend: str) -> nn.Module:
    twin = twin_of(model)
    twin.compile(backend=backend, dynamic=False)
    return twin


# Per mode: what the models without and with opweave are called, and how they are made.
MODES: dict[str, dict[str, Callable[[nn.Module], nn.Module]]] = {
    "eager": {"transformers": twin_of, "opweave.optimize": optimized},
    "compiled": {
        "torch.compile": partial(compiled, backend="inductor"),
        'torch.compile(backend="opweave")': partial(compiled, backend="opweave"),
    },
}


@torch.inference_mode()
def prefill(model: Any) -> float:
    """Return the time of one prompt, in seconds."""
    ids = torch.randint(0, model.config.vocab_size, (1, PREFILL))
    start = time.perf_counter()
    model(ids)
    return time.perf_counter() - start


@torch.inference_mode()
def decode(model: Any, batch: int, *, static: bool) -> float:
    """Return the median time of a decode step, in seconds."""
    ids = torch.randint(0, model.config.vocab_size, (batch, PROMPT))
    length = PROMPT + STEPS
    cache = transformers.StaticCache(model.config, max_cache_len=length) if static else None
    result = model.forward(ids, past_key_values=cache, use_cache=True)  # not compiled
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        token = result.logits[:, -1:].argmax(-1)
        result = model(token, past_key_values=result.past_key_values, use_cache=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.inference_mode()
def image(model: Any) -> float:
    """Return the time of one image, in seconds."""
    pixels = torch.randn(1, 3, 224, 224, dtype=model.dtype)
    start = time.perf_counter()
    model(pixels)
    return time.perf_counter() - start


def _cells(config: Any, mode: str) -> dict[str, tuple[Callable[[Any], float], int]]:
    """Return what is measured, by name, and its number of tokens or images."""
    if config.model_type == "resnet":
        return {"image": (image, 1)}
    cells: dict[str, tuple[Callable[[Any], float], int]] = {"prefill": (prefill, PREFILL)}
    static = mode == "compiled"
    recompiles = static and "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if config.model_type != "bert" and not recompiles:
        for batch in DECODED:
            cells[f"decode/{batch}"] = partial(decode, batch=batch, static=static), batch
    return cells


def measure(
    name: str, dtype: str, mode: str, cells: list[str], rounds: int, *, quiet: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    model = build(name, DTYPES[dtype])
    contenders = {who: make(model) for who, make in MODES[mode].items()}
    theirs, ours = contenders
    for cell, (time_of, size) in _cells(MODELS[name](), mode).items():
        if cell not in cells:
            continue
        measures = {who: partial(time_of, each) for who, each in contenders.items()}
        for warm_up in measures.values():
            warm_up()
        with progress(quiet=quiet) as bar:
            times = interleaved(
                measures, bar.track(range(rounds), description=f"{name} {dtype} {mode} {cell}")
            )
        ratios = [t / o for t, o in zip(times[theirs], times[ours], strict=True)]
        yield {
            "name": f"any_model.{mode}.{cell}",
            "case": f"{name}, {dtype}",
            "value": significant(size / statistics.median(times[ours])),
            "unit": "images/s" if cell == "image" else "tokens/s",
            "baseline": theirs,
            "ratio": significant(statistics.median(ratios)),
        }


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=PUBLISHED)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # of one code object, for all models together
    rows = [
        row
        for name in options.models
        for dtype in options.dtypes
        for mode in options.modes
        for row in measure(name, dtype, mode, options.cells, options.rounds, quiet=options.json)
    ]
    if options.json:
        print_json(describe_machine(), rows)
        return 0
    table = Table("case", "model", "per second", "ratio", "against")
    for row in rows:
        table.add_row(
            row["name"], row["case"], f"{row['value']:g}", f"{row['ratio']:g}", row["baseline"]
        )
    out.print(table)
    return 0


if __name__ == "__main__":
    run(main)
