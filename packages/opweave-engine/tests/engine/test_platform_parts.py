"""A platform's own parts are used, every one of them, and give the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.tiny_checkpoints import random_ids
from opweave.config import CacheConfig, EngineConfig, ParallelConfig
from opweave.config.patches import ConfigPatch
from opweave.platforms import AttentionSpec, CpuPlatform
from opweave_engine import LLM, EngineCore, SamplingParams
from opweave_engine.attention import (
    CacheSpec,
    LatentPagedAttention,
    PagedAttention,
    SequenceBatch,
)
from opweave_engine.decode_graphs import SequenceStep
from opweave_engine.errors import (
    InvalidArgumentError,
    NonFiniteLogitsError,
    UnsupportedCacheError,
)
from opweave_engine.parallel.executor import InProcessExecutor
from opweave_engine.runner import ModelRunner, Worker
from opweave_engine.sampling.sampler import Sampled, Sampler, SamplingRequest
from opweave_engine.scheduler import Scheduled, Scheduler

Checkpoints = Callable[[str], tuple[Path, Any]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_ids(seed, 3 + seed) for seed in range(4)]
used: set[str] = set()
specs: list[AttentionSpec] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    used.clear()
    specs.clear()


class OwnExecutor(InProcessExecutor):
    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        used.add("executor")
        return super().execute(steps)


class OwnWorker(Worker):
    def init_device(self) -> None:
        used.add("worker")
        super().init_device()


class OwnRunner(ModelRunner):
    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        used.add("runner")
        return super().execute(steps)


class OwnScheduler(Scheduler):
    def schedule(self) -> list[Scheduled]:
        used.add("scheduler")
        return super().schedule()


class OwnSampler(Sampler):
    def __call__(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> list[Sampled]:
        used.add("sampler")
        return super().__call__(logits, requests)


class OwnAttention(PagedAttention):
    name = "own"

    @classmethod
    def build_metadata(cls, batch: SequenceBatch) -> SequenceBatch:
        used.add("attention metadata")
        return batch

    def forward(self, metadata: Any, *inputs: Any, **options: Any) -> Tensor:
        used.add("attention")
        return super().forward(metadata, *inputs, **options)


class OwnLatentAttention(LatentPagedAttention):
    name = "own_latent"

    def forward(self, metadata: Any, *inputs: Any, **options: Any) -> Tensor:
        used.add("latent attention")
        return super().forward(metadata, *inputs, **options)


class PickyAttention(PagedAttention):
    name = "picky"
    block_multiple = 48

    @classmethod
    def unsupported(cls, spec: CacheSpec) -> str | None:
        return "it has no kernel" if spec.block_bytes(1) > 10_000 else super().unsupported(spec)


class OwnPlatform(CpuPlatform):
    name = "own"

    def config_defaults(self, config: EngineConfig) -> list[ConfigPatch]:
        return [ConfigPatch("cache.block_size", 32, "kernels like it")]

    def validate_request(self, params: Any) -> None:
        used.add("request")

    def post_load_model(self, model: torch.nn.Module) -> None:
        used.add("model")

    def get_executor_cls(self, config: EngineConfig) -> str:
        return f"{__name__}.OwnExecutor"

    def get_worker_cls(self, config: EngineConfig) -> str:
        return f"{__name__}.OwnWorker"

    def get_model_runner_cls(self, config: EngineConfig) -> str:
        return f"{__name__}.OwnRunner"

    def get_scheduler_cls(self, config: EngineConfig) -> str:
        return f"{__name__}:OwnScheduler"

    def get_sampler_cls(self, config: EngineConfig) -> str:
        return f"{__name__}:OwnSampler"

    def get_attn_backend_cls(self, spec: AttentionSpec) -> str:
        specs.append(spec)
        return f"{__name__}.{'OwnLatentAttention' if spec.is_latent else 'OwnAttention'}"


class PickyPlatform(CpuPlatform):
    name = "picky"

    def get_attn_backend_cls(self, spec: AttentionSpec) -> str:
        return f"{__name__}.PickyAttention"


def run(core: EngineCore) -> list[list[int]]:
    for i, prompt in enumerate(PROMPTS):
        core.add_request(core.prepare(str(i), prompt, GREEDY))
    found: dict[str, list[int]] = {}
    while core.has_unfinished:
        for output in core.step():
            found[output.request_id] = output.outputs[0].token_ids
    core.check_idle()
    return [found[str(i)] for i in range(len(PROMPTS))]


COMMON = {"executor", "worker", "runner", "scheduler", "sampler", "request", "model"}


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("llama", {"attention", "attention metadata"}),
        ("gemma3", {"attention", "attention metadata"}),
        ("deepseek", {"latent attention"}),
        ("mamba2", set()),
    ],
)
def test_every_part_is_the_platforms(
    kind: str, attention: set[str], checkpoint: Checkpoints
) -> None:
    path = checkpoint(kind)[0]
    core = EngineCore(path, EngineConfig(), platform=OwnPlatform())
    wanted = [output.outputs[0].token_ids for output in LLM(path).generate(PROMPTS, GREEDY)]
    assert run(core) == wanted
    assert used == COMMON | attention
    assert core.config.cache.block_size == 32
    assert core.scheduler.cache.block_size == 32


def test_what_the_platform_is_asked_for(checkpoint: Checkpoints) -> None:
    EngineCore(checkpoint("gemma3")[0], EngineConfig(), platform=OwnPlatform())
    windows = [spec.window for spec in specs]
    assert windows == [5, None]
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_size) for spec in specs} == {(4, 2, 24)}
    assert {spec.scale for spec in specs} == {20**-0.5}
    assert {spec.dtype for spec in specs} == {torch.float32}


def test_the_users_block_size_stays(checkpoint: Checkpoints) -> None:
    config = EngineConfig(cache=CacheConfig(block_size=16))
    core = EngineCore(checkpoint("llama")[0], config, platform=OwnPlatform())
    assert core.config.cache.block_size == 16


def test_a_backend_refuses_what_it_cannot_keep(checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    with pytest.raises(UnsupportedCacheError, match=r"'picky'.*multiple of 48 tokens, not 64"):
        EngineCore(path, EngineConfig(), platform=PickyPlatform())
    config = EngineConfig(cache=CacheConfig(block_size=96))
    assert run(EngineCore(path, config, platform=PickyPlatform()))
    with pytest.raises(UnsupportedCacheError, match=r"'picky'.*keys and values only"):
        EngineCore(checkpoint("deepseek")[0], config, platform=PickyPlatform())


@pytest.mark.parametrize("kind", ["llama", "mamba2"])  # keys and values, and states
def test_an_error_of_a_part_costs_no_request_its_tokens(
    kind: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(checkpoint(kind)[0], EngineConfig(), platform=OwnPlatform())
    wanted = run(core)
    sample, calls = OwnSampler.__call__, 0

    def fails_at_times(self: OwnSampler, *arguments: Any) -> list[Sampled]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise NonFiniteLogitsError("of some row")
        return sample(self, *arguments)

    monkeypatch.setattr(OwnSampler, "__call__", fails_at_times)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(core.prepare(str(i), prompt, GREEDY))
    found: dict[str, list[int]] = {}
    failures = 0
    while core.has_unfinished:
        try:
            outputs = core.step()
        except NonFiniteLogitsError:
            failures += 1
            core.scheduler.cache.check_integrity()
            continue
        found |= {output.request_id: output.outputs[0].token_ids for output in outputs}
    assert failures > 0
    assert [found[str(i)] for i in range(len(PROMPTS))] == wanted
    core.check_idle()


def test_one_process_runs_one_rank(checkpoint: Checkpoints) -> None:
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    with pytest.raises(InvalidArgumentError, match=r"tensor_parallel_size=2.*one rank"):
        InProcessExecutor(checkpoint("llama")[0], config, CpuPlatform())
