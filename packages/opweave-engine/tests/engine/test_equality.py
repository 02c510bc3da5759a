"""Every family gives the tokens of transformers, however its requests are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import opweave.compile
from engine.shared_rank import shared_rank
from models.tiny_checkpoints import Checkpoints, random_ids
from opweave import ir
from opweave.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from opweave_engine import LLM, SamplingParams
from opweave_engine.attention import AttentionBackend

Wanted = Callable[[str], list[list[int]]]
FAMILIES = (
    "llama",
    "mistral",
    "qwen2_windows",
    "qwen3",
    "mixtral_window",
    "qwen3_moe_mixed",
    "deepseek",
    "deepseek_direct",
    "gemma3",
    "mamba2",
    "mamba2_limits",
)
COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
# Two begin alike, so that the second finds blocks of the first.
PROMPTS = [*(random_ids(seed, count) for seed, count in enumerate([1, 7, 23, 2, 40]))]
PROMPTS.append([*PROMPTS[4][:33], *random_ids(9, 5)])

each_family = pytest.mark.parametrize("kind", FAMILIES)


@pytest.fixture(scope="module")
def wanted(checkpoint: Checkpoints) -> Wanted:
    """Return a function that gives transformers' tokens after each prompt."""

    @cache
    def get(kind: str) -> list[list[int]]:
        model = checkpoint(kind)[1]
        found = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            generated = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=COUNT,
                eos_token_id=None,
                # Its step from a state of Mamba-2 does not limit the time step; its scan does.
                use_cache=kind != "mamba2_limits",
            )
            found.append(generated[0, len(prompt) :].tolist())
        return found

    return get


def tokens(llm: LLM, prompts: Any = PROMPTS) -> list[list[int]]:
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    llm._core.check_idle()
    return found


def config(*, prefix: bool = True, blocks: int | None = None, **limits: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(block_size=16, num_blocks=blocks, enable_prefix_caching=prefix),
        scheduler=SchedulerConfig(**limits),
    )


@each_family
def test_chunks_of_prompts(kind: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    path = checkpoint(kind)[0]
    for limits in (
        {"max_num_seqs": 3, "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 100, "enable_chunked_prefill": False, "max_model_len": 96},
    ):
        assert tokens(LLM(path, config=config(**limits))) == wanted(kind)


@each_family
def test_preemption(kind: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    llm = LLM(checkpoint(kind)[0], config=config(blocks=4, prefix=False))
    assert tokens(llm) == wanted(kind)
    # A state does not grow: who has one keeps it.
    assert (llm.stats().preemptions > 0) == (not kind.startswith("mamba2"))


@each_family
def test_prefixes_that_are_cached(kind: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    path = checkpoint(kind)[0]
    llm = LLM(path, config=config())
    assert tokens(llm) == wanted(kind)
    assert llm.stats().prefix_hits == 0
    assert tokens(llm) == wanted(kind)
    assert [tokens(llm, prompt)[0] for prompt in PROMPTS] == wanted(kind)
    shares = not kind.startswith("mamba2")  # a state is overwritten by the next token
    # Twice, full blocks before the last token: of 23, 40 and 38 tokens.
    assert llm.stats().prefix_hits == (2 * (16 + 32 + 32) if shares else 0)
    without = LLM(path, config=config(prefix=False))
    assert tokens(without) == tokens(without) == wanted(kind)
    assert without.stats().prefix_hits == 0


def _providers() -> list[str]:
    ir.current_registry().ensure_ready()
    ops = ir.current_registry().ops.values()
    return sorted({provider for op in ops for provider in op.supported_providers()})


# Each provider with some families, and each family with some providers.
@pytest.mark.parametrize(
    ("kind", "provider"),
    [
        pytest.param(kind, provider, marks=() if (i + j) % 4 == 0 else pytest.mark.slow)
        for (i, kind), (j, provider) in product(enumerate(FAMILIES), enumerate(_providers()))
    ],
)
def test_each_provider_where_it_can(
    kind: str, provider: str, checkpoint: Checkpoints, wanted: Wanted
) -> None:
    ops = ir.current_registry().ops.values()
    lists = {op.name: [provider] for op in ops if provider in op.supported_providers()}
    assert tokens(LLM(checkpoint(kind)[0], ir_op_priority=lists)) == wanted(kind)


# Code is generated for the layers' own operations, and for the ops as kernels of providers.
COMPILERS = ("aot_eager", "inductor", "opweave")
# On two ranks: each has some of the tokens between collectives, or all of them.
TWO_RANKS = {
    "divided": {"sequence_parallelism": True, "codegen": False},
    "generated": {"sequence_parallelism": True},
    "whole": {"sequence_parallelism": False, "codegen": False},
}
QUICK = {("mamba2_limits", "opweave"), ("mistral", "divided")}  # the others take longer


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(FAMILIES, COMPILERS)
    ],
)
def test_compiled(kind: str, backend: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    torch.compiler.reset()
    compiled = EngineConfig(compilation_config={"mode": 3, "backend": backend})
    llm = LLM(checkpoint(kind)[0], config=compiled)
    graphs = counters["stats"]["unique_graphs"]
    assert tokens(llm) == wanted(kind)
    assert counters["stats"]["unique_graphs"] == graphs  # all was compiled when it started


@pytest.fixture(scope="module")
def second_rank() -> Iterator[Any]:
    with shared_rank() as start:
        yield start


@pytest.fixture
def two_ranks(
    second_rank: Any, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLM]]:
    """Return a function that starts an engine of a kind, compiled or not, on two ranks."""
    monkeypatch.setattr("opweave_engine.parallel.executor.Process", second_rank)
    started: list[LLM] = []

    def start(kind: str, **compiling: Any) -> LLM:
        torch.compiler.reset()
        both = EngineConfig(
            cache=CacheConfig(block_size=16, num_blocks=8),  # in which many are preempted
            parallel=ParallelConfig(tensor_parallel_size=2, timeout=300.0),
            compilation_config=compiling,
        )
        started.append(LLM(checkpoint(kind)[0], config=both))
        return started[-1]

    yield start
    for llm in started:
        llm.shutdown()


@each_family
def test_two_ranks(kind: str, two_ranks: Callable[..., LLM], wanted: Wanted) -> None:
    assert tokens(two_ranks(kind)) == wanted(kind)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(
            kind,
            options,
            id=f"{kind}-{name}",
            marks=() if (kind, name) in QUICK else pytest.mark.slow,
        )
        for kind, (name, options) in product(FAMILIES, TWO_RANKS.items())
    ],
)
def test_two_ranks_compiled(
    kind: str, options: dict[str, bool], two_ranks: Callable[..., LLM], wanted: Wanted
) -> None:
    """With sequence parallelism, and without it."""
    llm = two_ranks(kind, mode=3, backend="opweave", options=options)
    graphs = counters["stats"]["unique_graphs"]
    assert tokens(llm) == wanted(kind)
    assert counters["stats"]["unique_graphs"] == graphs
    llm.generate(PROMPTS[4], SamplingParams(max_tokens=1))
    found = opweave.compile.report().collectives
    assert {"reduce_scatter", "all_gather"}.issubset(found) == options["sequence_parallelism"]


# NaN makes the chunks of 256 tokens of the last one slow.
@pytest.mark.parametrize(
    "kind", [*FAMILIES[:-1], pytest.param(FAMILIES[-1], marks=pytest.mark.slow)]
)
def test_what_was_in_memory_before_is_not_read(
    kind: str, checkpoint: Checkpoints, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = AttentionBackend.__init__

    def spoiled(backend: Any, *arguments: Any) -> None:
        allocate(backend, *arguments)
        for tensor in vars(backend).values():
            tensor[1:].fill_(float("nan"))

    monkeypatch.setattr(AttentionBackend, "__init__", spoiled)
    for provider in ("opweave_c", "native") if kind in ("llama", "deepseek") else ("opweave_c",):
        lists = {op: [provider] for op in ("paged_attention", "reshape_and_cache")}
        limits = config(max_num_seqs=3, max_num_batched_tokens=9)
        llm = LLM(checkpoint(kind)[0], config=limits, ir_op_priority=lists)
        assert tokens(llm) == wanted(kind)
