"""Every family gives the tokens of transformers, however its requests are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tiny_checkpoints import random_ids
from opweave import ir
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave.engine import LLM, SamplingParams
from opweave.engine.attention import AttentionBackend

Checkpoints = Callable[[str], tuple[Path, Any]]
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
KEEPS_EVERY_TOKEN = {"llama", "qwen2_windows", "qwen3", "deepseek", "deepseek_direct", "gemma3"}
COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
# Two begin alike, so that the second finds blocks of the first.
PROMPTS = [
    *(random_ids(seed, count) for seed, count in enumerate([1, 7, 23, 2, 40])),
]
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
def test_together_and_alone(kind: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    llm = LLM(checkpoint(kind)[0])
    assert tokens(llm) == wanted(kind)
    assert [tokens(llm, prompt)[0] for prompt in PROMPTS] == wanted(kind)


@each_family
def test_chunks_of_prompts(kind: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    path = checkpoint(kind)[0]
    for limits in (
        {"max_num_seqs": 3, "max_num_batched_tokens": 5},
        {"max_num_seqs": 64, "max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 100, "enable_chunked_prefill": False, "max_model_len": 96},
    ):
        assert tokens(LLM(path, config=config(**limits))) == wanted(kind)


@each_family
def test_preemption(kind: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    llm = LLM(checkpoint(kind)[0], config=config(blocks=6, prefix=False))
    assert tokens(llm) == wanted(kind)
    assert (llm.stats().preemptions > 0) == (kind in KEEPS_EVERY_TOKEN)


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


@each_family
@pytest.mark.parametrize("provider", _providers())
def test_each_provider_where_it_can(
    kind: str, provider: str, checkpoint: Checkpoints, wanted: Wanted
) -> None:
    ops = ir.current_registry().ops.values()
    lists = {op.name: [provider] for op in ops if provider in op.supported_providers()}
    assert tokens(LLM(checkpoint(kind)[0], ir_op_priority=lists)) == wanted(kind)


@pytest.mark.slow
@each_family
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(kind: str, backend: str, checkpoint: Checkpoints, wanted: Wanted) -> None:
    torch.compiler.reset()
    compiled = EngineConfig(compilation_config={"mode": 3, "backend": backend})
    assert tokens(LLM(checkpoint(kind)[0], config=compiled)) == wanted(kind)


@each_family
def test_what_was_in_memory_before_is_not_read(
    kind: str, checkpoint: Checkpoints, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = AttentionBackend.__init__

    def spoiled(backend: Any, *arguments: Any) -> None:
        allocate(backend, *arguments)
        for tensor in vars(backend).values():
            tensor[1:].fill_(float("nan"))

    monkeypatch.setattr(AttentionBackend, "__init__", spoiled)
    for provider in ("opweave_c", "native"):
        lists = {op: [provider] for op in ("paged_attention", "reshape_and_cache")}
        limits = config(max_num_seqs=3, max_num_batched_tokens=9)
        llm = LLM(checkpoint(kind)[0], config=limits, ir_op_priority=lists)
        assert tokens(llm) == wanted(kind)
