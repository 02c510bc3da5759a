"""Steps that are launched before the tokens of the step before are known change no output."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.test_decode_graphs import FakeRecorder
from opweave.config import CacheConfig, EngineConfig, SchedulerConfig
from opweave.ir.errors import SettingError
from opweave.platforms import CpuPlatform
from opweave.platforms.base import Capabilities, GraphRecorder
from opweave_engine import CompletionOutput, EngineCore, SamplingParams
from opweave_engine.decode_graphs import SequenceStep
from opweave_engine.errors import NonFiniteLogitsError
from opweave_engine.kv_cache import CacheGroup, EveryToken, KVCacheManager
from opweave_engine.request import Request
from opweave_engine.runner import ModelRunner
from opweave_engine.sampling.sampler import Sampled, Sampler, SamplingRequest, read_tokens, sample
from opweave_engine.scheduler import Scheduled, Scheduler

MODEL = Path(__file__).parents[4] / "examples" / "models" / "tiny-pydoc"
TEXTS = ["def ", "Return the ", "import os\n", "class Path", "a list of ", "The", "\n\n", "raise "]
Result = Callable[[], list[Sampled]]


class DelayedRunner(ModelRunner):
    """A device that computes launched steps in their order, once the host waits for one.

    Attributes:
        launches: the number of launches.
        waits: the number of each step that the host waited for, and of the launches until then.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.launches, self.waits = 0, list[tuple[int, int]]()
        self._queue: list[Callable[[], None]] = []

    def launch(self, steps: Sequence[SequenceStep]) -> Result:
        self.launches += 1
        number, done = self.launches, list[list[Sampled] | Exception]()

        def compute() -> None:
            try:
                done.append(ModelRunner.launch(self, steps)())
            except Exception as error:
                done.append(error)

        def wait() -> list[Sampled]:
            self.waits.append((number, self.launches))
            while not done:
                self._queue.pop(0)()
            if isinstance(done[0], Exception):
                raise done[0]
            return done[0]

        self._queue.append(compute)
        return wait


class DelayedPlatform(CpuPlatform):
    name = "delayed"

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return replace(CpuPlatform().capabilities, streams=True)

    def get_model_runner_cls(self, config: EngineConfig) -> str | None:
        return f"{__name__}:DelayedRunner"


class GraphPlatform(DelayedPlatform):
    name = "delayed_graphs"
    _recorder: ClassVar = FakeRecorder()

    def graph_recorder(self) -> GraphRecorder:
        return self._recorder


def engine(platform: CpuPlatform, *, blocks: int = 200, **options: Any) -> EngineCore:
    caching = options.pop("prefix_caching", True)
    config = EngineConfig(
        dtype="float32",
        cache=CacheConfig(block_size=16, num_blocks=blocks, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(**{"max_num_seqs": 6, "max_model_len": 128, **options}),
    )
    return EngineCore(MODEL, config, platform=platform)


def runner_of(core: EngineCore) -> DelayedRunner:
    executor: Any = core.executor
    runner: DelayedRunner = executor.worker.runner
    return runner


# Random loads.


class Job(NamedTuple):
    """A request: when it arrives, and after how many tokens it is aborted; 0: never."""

    prompt: str
    params: SamplingParams
    arrival: int = 0
    abort: int = 0
    streams: bool = True
    priority: int = 0


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "ignore_eos": True, **options}, max_tokens=max_tokens
    )


def random_jobs(seed: int) -> list[Job]:
    draw = random.Random(seed)

    def params() -> SamplingParams:
        options: dict[str, Any] = {}
        if draw.random() < 0.4:
            options["stop"] = draw.sample(["(", ".\n", "th", "on ", "self", "None"], 2)
        if draw.random() < 0.3:
            options["stop_token_ids"] = [draw.randrange(300) for _ in range(5)]
        most = draw.choice([1, 12, 40, 60, 90])
        if draw.random() < 0.2:
            options["min_tokens"] = min(6, most)
        if draw.random() < 0.15:
            options |= {"temperature": 1.0, "seed": draw.randrange(99), "n": draw.choice([1, 3])}
        extra: list[dict[str, Any]] = [
            {"repetition_penalty": 1.3}, {"logprobs": 2}, {"prompt_logprobs": 0},
            {"bad_words": ["the"]}, {"allowed_token_ids": [*range(400)]}, {"logit_bias": {9: 2.0}},
        ]  # fmt: skip
        if draw.random() < 0.15:
            options |= draw.choice(extra)
        return greedy(most, ignore_eos=draw.random() < 0.5, **options)

    return [
        Job(
            "".join(draw.choices(TEXTS, k=draw.choice([1, 2, 9]))),
            params(),
            draw.choice([0, 0, 0, draw.randrange(60)]),
            draw.choice([0, 0, 0, 1, 5, 9]),
            draw.random() < 0.5,
            draw.randrange(2),
        )
        for _ in range(14)
    ]


def run(core: EngineCore, jobs: Sequence[Job]) -> list[list[CompletionOutput]]:
    """Return the outputs of each job."""
    found: dict[int, list[CompletionOutput]] = {}
    waiting, steps = dict(enumerate(jobs)), 0
    while waiting or core.has_unfinished:
        for i, job in list(waiting.items()):
            if job.arrival <= steps:
                request = core.prepare(
                    str(i), job.prompt, job.params, streams=job.streams or job.abort > 0,
                    priority=job.priority,
                )  # fmt: skip
                core.add_request(request)
                del waiting[i]
        for output in core.step():
            i = int(output.request_id)
            found[i] = output.outputs
            if not output.finished and 0 < jobs[i].abort <= len(output.outputs[0].token_ids):
                (last,) = core.abort([output.request_id])
                found[i] = last.outputs[:1]  # the others are as far as the scheduler went
        core.scheduler.cache.check_integrity()
        steps += 1
    core.check_idle()
    return [found[i] for i in range(len(jobs))]


def texts_of(outputs: Sequence[Sequence[CompletionOutput]]) -> list[Any]:
    return [
        [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in several]
        for several in outputs
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"blocks": 9}, {"blocks": 10, "prefix_caching": False, "policy": "priority"}],
    ids=["roomy", "small", "small-priority"],
)
def test_random_loads(options: dict[str, Any]) -> None:
    core, plain = engine(DelayedPlatform(), **options), engine(CpuPlatform(), **options)
    for seed in range(8):
        jobs = random_jobs(seed)
        assert texts_of(run(core, jobs)) == texts_of(run(plain, jobs)), seed
    overlapped = [number for number, launches in runner_of(core).waits if launches > number]
    assert len(overlapped) > 150
    if options:
        assert core.stats().preemptions > 5


def test_greedy_loads_overlap_although_requests_wait() -> None:
    jobs = [Job(text, greedy(count)) for count, text in enumerate(TEXTS * 2, 20)]
    core = engine(DelayedPlatform(), max_num_seqs=3)
    plain = engine(CpuPlatform(), max_num_seqs=3)
    assert texts_of(run(core, jobs)) == texts_of(run(plain, jobs))
    waits = runner_of(core).waits
    overlapped = [number for number, launches in waits if launches > number]
    assert len(overlapped) > 0.8 * len(waits)


def test_statistics_are_the_same() -> None:
    stops = [{"stop": ["e"]}, {"stop": ["("]}, {}, {"stop_token_ids": [*range(60)]}]
    jobs = [Job(text, greedy(30, **stops[i % 4])) for i, text in enumerate(TEXTS[:6])]
    stats = []
    for platform in (CpuPlatform(), DelayedPlatform()):
        core = engine(platform)
        run(core, jobs)
        found = core.stats()
        iterations = found.histograms["iteration_tokens"]
        stats.append(
            (found.steps, found.generation_tokens, found.prompt_tokens, found.finished,
             found.prefix_hits, found.running, found.waiting, found.kv_usage, iterations)
        )  # fmt: skip
    assert stats[0] == stats[1]
    assert stats[0][3]["stop"] > 2


# The device never waits for the host, as far as the host can know the next step.


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    core = engine(DelayedPlatform())
    run(core, [Job("def ", greedy(20))])
    assert runner_of(core).waits == [(n, min(n + 1, 20)) for n in range(1, 21)]


def test_a_stop_costs_one_launch_which_nobody_waits_for() -> None:
    (((expected,),),) = [run(engine(CpuPlatform()), [Job("def ", greedy(20))])]
    token = next(t for t in expected.token_ids[4:] if t not in expected.token_ids[:4])
    place = expected.token_ids.index(token)
    core = engine(DelayedPlatform())
    ((found,),) = run(core, [Job("def ", greedy(20, stop_token_ids=[token]))])
    assert found.token_ids == expected.token_ids[: place + 1]
    assert found.finish_reason == "stop"
    assert runner_of(core).launches == place + 2
    assert [number for number, _ in runner_of(core).waits] == [*range(1, place + 2)]
    assert core._ahead is None  # or else it would keep the request
    # The launch that was dropped does not disturb the next request, which gets its blocks.
    assert texts_of(run(core, [Job("Return ", greedy(20))])) == texts_of(
        run(engine(CpuPlatform()), [Job("Return ", greedy(20))])
    )


@pytest.mark.parametrize("reads_at_once", [{"temperature": 1.0}, {"logprobs": 0}, {"min_tokens": 8,
    "ignore_eos": False}, {"repetition_penalty": 1.1}, {"bad_words": ["zebra"]},
    {"structured_outputs": {"regex": "[a-z ]*"}}])  # fmt: skip
def test_tokens_that_need_the_host_are_read_at_once(reads_at_once: dict[str, Any]) -> None:
    core = engine(DelayedPlatform())
    if "structured_outputs" in reads_at_once:
        from opweave_engine import StructuredOutputsParams

        form = StructuredOutputsParams(**reads_at_once["structured_outputs"])
        reads_at_once = {"structured_outputs": form}
    run(core, [Job("def ", greedy(8, **reads_at_once)), Job("class ", greedy(8))])
    assert all(number == launches for number, launches in runner_of(core).waits)


def test_an_abort_between_launch_and_result() -> None:
    core = engine(DelayedPlatform())
    expected = run(engine(CpuPlatform()), [Job("class ", greedy(9))])
    for name, prompt in (("a", "def "), ("b", "class ")):
        core.add_request(core.prepare(name, prompt, greedy(9)))
    core.step()
    (aborted,) = core.abort(["a"])
    assert len(aborted.outputs[0].token_ids) == 1
    found = []
    while core.has_unfinished:
        found = core.step() or found
    assert texts_of([found[0].outputs]) == texts_of(expected)
    core.check_idle()
    core.add_request(core.prepare("c", "def ", greedy(9)))
    core.step()
    core.abort(["c"])
    core.check_idle()  # although a launch is not read
    assert not core.has_unfinished


# Errors.


def broken(core: EngineCore, bad: Callable[[int, Tensor], None]) -> None:
    """Pass each call's number and logits to *bad*."""
    model: Any = runner_of(core).model
    compute, calls = model.compute_logits, iter(range(1, 1000))

    def logits(hidden: Tensor) -> Tensor:
        found: Tensor = compute(hidden).clone()
        bad(next(calls), found)
        return found

    model.compute_logits = logits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_fail_their_request(value: float) -> None:
    jobs = [Job(text, greedy(12)) for text in TEXTS[:3]]
    expected = texts_of(run(engine(CpuPlatform()), jobs))
    core = engine(DelayedPlatform())

    def bad(call: int, logits: Tensor) -> None:
        if call == 5:
            logits[1] = value

    broken(core, bad)
    for i, job in enumerate(jobs):
        core.add_request(core.prepare(str(i), job.prompt, job.params))
    found: dict[str, Any] = {}
    while core.has_unfinished:
        found |= {output.request_id: output for output in core.step()}
    core.check_idle()
    assert isinstance(found["1"].error, NonFiniteLogitsError)
    assert "returned NaN or infinite logits" in str(found["1"].error)
    assert len(found["1"].outputs[0].token_ids) == 4
    assert texts_of([found["0"].outputs, found["2"].outputs]) == [expected[0], expected[2]]


def test_a_token_too_many_fails_nobody() -> None:
    tokens = run(engine(CpuPlatform()), [Job(TEXTS[0], greedy(12))])[0][0].token_ids
    token = next(t for t in tokens[3:] if t not in tokens[:3])
    calls = tokens.index(token) + 2
    jobs = [Job(TEXTS[0], greedy(12, stop_token_ids=[token])), Job(TEXTS[1], greedy(12))]
    expected = run(engine(CpuPlatform()), jobs)
    core = engine(DelayedPlatform())

    def bad(call: int, logits: Tensor) -> None:
        if call == calls:
            assert len(logits) == 2
            logits[0] = torch.nan

    broken(core, bad)
    assert texts_of(run(core, jobs)) == texts_of(expected)


def test_a_launch_that_fails_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(DelayedPlatform())
    jobs = [Job(text, greedy(12)) for text in TEXTS[:2]]
    expected = run(engine(CpuPlatform()), jobs)
    launch, calls = core.executor.launch, iter(range(1, 100))

    def fails_once(steps: Sequence[SequenceStep]) -> Result:
        if next(calls) == 4:
            raise RuntimeError("out of memory")
        return launch(steps)

    monkeypatch.setattr(core.executor, "launch", fails_once)
    for i, job in enumerate(jobs):
        core.add_request(core.prepare(str(i), job.prompt, job.params))
    assert [len(core.step()[0].outputs[0].token_ids) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="out of memory"):
        core.step()
    found: dict[int, list[CompletionOutput]] = {}
    while core.has_unfinished:
        found |= {int(output.request_id): output.outputs for output in core.step()}
    assert texts_of([found[0], found[1]]) == texts_of(expected)
    core.check_idle()


# Recorded steps.


GRAPHS = EngineConfig(
    dtype="float32",
    cache=CacheConfig(block_size=16, num_blocks=60),
    scheduler=SchedulerConfig(max_num_seqs=6, max_model_len=128),
)


@pytest.mark.parametrize("seed", range(2))
def test_graphs_sample_greedy_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphPlatform, "_recorder", recorder := FakeRecorder())
    jobs = random_jobs(seed)
    core = EngineCore(MODEL, GRAPHS, platform=GraphPlatform())
    assert texts_of(run(core, jobs)) == texts_of(run(engine(CpuPlatform()), jobs))
    assert recorder.replays > 20
    assert recorder.recordings == 3  # 1, 2 and 4 sequences
    recorder.replays = 0
    calls: list[int] = []
    sample = Sampler.__call__

    def counted(self: Sampler, logits: Tensor, requests: Any) -> list[Sampled]:
        calls.append(len(requests))
        return sample(self, logits, requests)

    monkeypatch.setattr(Sampler, "__call__", counted)
    run(core, [Job("import os\n", greedy(9))])
    assert recorder.replays == 8
    assert not calls  # not even for the prompt
    run(core, [Job("import os\n", greedy(9, temperature=1.0))])
    assert recorder.replays == 16
    assert calls == [1] * 9


# Where it applies.


class OwnRunner(ModelRunner):
    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        return super().execute(steps)


class OwnSampler(Sampler):
    def __call__(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> list[Sampled]:
        return super().__call__(logits, requests)


class DeclaredSampler(OwnSampler):
    def launch(self, logits: Tensor) -> Tensor:
        return super().launch(logits)


class OwnScheduler(Scheduler):
    def schedule(self) -> list[Scheduled]:
        return super().schedule()


class OwnPartsPlatform(DelayedPlatform):
    name = "own_parts"
    _parts: ClassVar[dict[str, str]] = {}

    def get_model_runner_cls(self, config: EngineConfig) -> str | None:
        return self._parts.get("runner")

    def get_sampler_cls(self, config: EngineConfig) -> str | None:
        return self._parts.get("sampler")

    def get_scheduler_cls(self, config: EngineConfig) -> str | None:
        return self._parts.get("scheduler")


@pytest.mark.parametrize(
    ("part", "name", "overlaps"),
    [
        ("runner", "DelayedRunner", True),
        ("runner", "OwnRunner", False),
        ("sampler", "OwnSampler", False),
        ("sampler", "DeclaredSampler", True),
        ("scheduler", "OwnScheduler", False),
    ],
)
def test_parts_of_a_platform(
    part: str,
    name: str,
    overlaps: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(OwnPartsPlatform, "_parts", {part: f"{__name__}:{name}"})
    with caplog.at_level(logging.WARNING):
        core = engine(OwnPartsPlatform(), async_scheduling=True)
    assert core._overlaps == overlaps
    assert ("async_scheduling=True has no effect" in caplog.text) == (not overlaps)
    jobs = [Job("def ", greedy(5))]
    assert texts_of(run(core, jobs)) == texts_of(run(engine(CpuPlatform()), jobs))


def test_the_default_is_the_devices() -> None:
    assert not engine(CpuPlatform())._overlaps
    assert engine(CpuPlatform(), async_scheduling=True)._overlaps
    assert engine(DelayedPlatform())._overlaps
    assert not engine(DelayedPlatform(), async_scheduling=False)._overlaps
    with pytest.raises(
        SettingError, match=r"async_scheduling='yes' must be True or False, or None"
    ):
        SchedulerConfig(async_scheduling="yes")  # type: ignore[arg-type]


def test_the_cpu_with_async_scheduling() -> None:
    jobs = random_jobs(7)
    core = engine(CpuPlatform(), async_scheduling=True)
    assert texts_of(run(core, jobs)) == texts_of(run(engine(CpuPlatform()), jobs))


# The parts.


def scheduler_of(
    *prompts: int, blocks: int = 8, **options: Any
) -> tuple[Scheduler, list[Scheduled]]:
    """Return a scheduler whose requests of these lengths are in a running step."""
    cache = KVCacheManager([CacheGroup(EveryToken(), blocks)], 4)
    scheduler = Scheduler(SchedulerConfig(**{"max_num_seqs": 2, **options}), cache)
    for i, count in enumerate(prompts):
        scheduler.add(Request(str(i), [i] * count))
    return scheduler, scheduler.schedule()


def test_a_step_ahead() -> None:
    scheduler, step = scheduler_of(4, 2)
    one, other = scheduler.ahead(step)
    assert (one.request, one.num_tokens, len(one.tables[0])) == (step[0].request, 1, 2)
    assert (other.request, other.num_tokens, len(other.tables[0])) == (step[1].request, 1, 1)
    assert len(step[0].tables[0]) == 1  # the running step keeps its table


def test_a_step_ahead_needs_blocks() -> None:
    scheduler, step = scheduler_of(4, 4, blocks=3)
    assert scheduler.ahead(step) == []
    assert len(scheduler.ahead(step[:1])) == 1
    scheduler.cache.check_integrity()


def test_a_request_that_may_start_comes_first() -> None:
    scheduler, step = scheduler_of(4, 2)
    scheduler.add(Request("waits", [1]))
    assert len(scheduler.ahead(step)) == 2  # there is no seat
    assert scheduler.ahead(step[:1]) == []  # one ends with this step
    scheduler, step = scheduler_of(4)
    scheduler.add(Request("large", [1] * 40))
    assert len(scheduler.ahead(step)) == 1  # there are no blocks
    scheduler, step = scheduler_of(4)
    scheduler.add(Request("small", [1]))
    assert scheduler.ahead(step) == []
    scheduler, step = scheduler_of(4, 4, policy="priority")
    scheduler.add(Request("urgent", [1], priority=-1))
    assert scheduler.ahead(step) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launched_samples_are_those_of_the_sampler(dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 4, (64, 50), generator=torch.manual_seed(0)).to(dtype)  # with ties
    logits[3, :49] = -torch.inf
    requests = [SamplingRequest(SamplingParams(temperature=0), 0)] * 64
    assert all(request.is_plain for request in requests)
    tokens = Sampler().launch(logits).tolist()
    assert tokens == sample(logits, requests)
    assert read_tokens(tokens) == [Sampled(token) for token in tokens]


def test_rows_that_are_not_finite() -> None:
    logits = torch.zeros(5, 7)
    logits[1, 3], logits[2], logits[4, 2] = torch.inf, -torch.inf, torch.nan
    with pytest.raises(NonFiniteLogitsError, match="NaN or infinite") as error:
        read_tokens(Sampler().launch(logits).tolist())
    assert error.value.rows == (1, 2, 4)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}],
)
def test_requests_that_are_not_plain(options: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0, **options})
    assert not SamplingRequest(params, 0).is_plain
    assert not SamplingRequest(SamplingParams(temperature=0), 0, forbidden=(3,)).is_plain
    assert not SamplingRequest(SamplingParams(temperature=0), 0, allowed=b"\1").is_plain
