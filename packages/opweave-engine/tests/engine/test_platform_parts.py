"""A platform's own parts are used, every one of them, and give the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.tiny_checkpoints import Checkpoints, random_ids
from opweave.config import CacheConfig, EngineConfig, ParallelConfig
from opweave.config.patches import ConfigPatch
from opweave.platforms import AttentionSpec, CpuPlatform
from opweave_engine import LLM, EngineCore, SamplingParams
from opweave_engine.attention import CacheSpec, LatentPagedAttention, PagedAttention, SequenceBatch
from opweave_engine.errors import InvalidArgumentError, NonFiniteLogitsError, UnsupportedCacheError
from opweave_engine.parallel.executor import InProcessExecutor
from opweave_engine.runner import ModelRunner, Worker
from opweave_engine.sampling.sampler import Sampled, Sampler
from opweave_engine.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_ids(seed, 3 + seed) for seed in range(4)]
used: set[str] = set()
specs: list[AttentionSpec] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    used.clear()
    specs.clear()


def spied(base: type, **methods: str) -> Any:
    """Return a subclass whose *methods* note that the part of that name is used."""

    def spy(method: str, part: str) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            used.add(part)
            return getattr(super(own, self), method)(*arguments, **options)

        return call

    own: Any = type(
        f"Own{base.__name__}", (base,), {m: spy(m, part) for m, part in methods.items()}
    )
    return own


OwnExecutor = spied(InProcessExecutor, execute="executor")
OwnWorker = spied(Worker, init_device="worker")
OwnRunner = spied(ModelRunner, execute="runner")
OwnScheduler = spied(Scheduler, schedule="scheduler")
OwnSampler = spied(Sampler, __call__="sampler")
OwnLatentAttention = spied(LatentPagedAttention, forward="latent attention")


class OwnAttention(spied(PagedAttention, forward="attention")):  # type: ignore[misc]
    name = "own"

    @classmethod
    def build_metadata(cls, batch: SequenceBatch) -> SequenceBatch:
        used.add("attention metadata")
        return batch


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
    if kind == "gemma3":
        assert [spec.window for spec in specs] == [5, None]
        sizes = {(spec.num_heads, spec.num_kv_heads, spec.head_size) for spec in specs}
        assert (sizes, {spec.scale for spec in specs}) == ({(4, 2, 24)}, {20**-0.5})
        assert {spec.dtype for spec in specs} == {torch.float32}
    wanted = [output.outputs[0].token_ids for output in LLM(path).generate(PROMPTS, GREEDY)]
    assert run(core) == wanted
    assert used == COMMON | attention
    assert core.config.cache.block_size == 32
    assert core.scheduler.cache.block_size == 32


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

    def fails_at_times(self: Any, *arguments: Any) -> list[Sampled]:
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
