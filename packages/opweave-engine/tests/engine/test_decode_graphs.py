"""Decode steps from recorded graphs give the tokens of steps without graphs."""

from __future__ import annotations

import io
import logging
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor

from models.tiny_checkpoints import Checkpoints
from opweave.config import CompilationConfig, EngineConfig
from opweave.config.engine import CacheConfig, ParallelConfig, SchedulerConfig
from opweave.config.terminal import ProgressBar
from opweave.ir.errors import SettingError
from opweave.platforms.base import AttentionSpec, GraphRecorder
from opweave.platforms.builtin import CpuPlatform
from opweave_engine import CompletionOutput, SamplingParams
from opweave_engine.attention import PagedAttention
from opweave_engine.core import EngineCore
from opweave_engine.decode_graphs import decode_sizes, record_decode_graphs


class FakeRecorder:
    """A recorder for the CPU, which repeats all that a function does, on the host, too.

    Attributes:
        recordings: the number of recordings.
        replays: the number of replays.
    """

    def __init__(self) -> None:
        self.recordings = self.replays = 0
        self._records = False

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self._records = True
        try:
            run()
        finally:
            self._records = False
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            run()

        return replay

    def wait(self) -> None:
        if self._records:
            raise RuntimeError("operation not permitted when stream is capturing")


class RecordingPlatform(CpuPlatform):
    name = "recording"
    _recorder: ClassVar = FakeRecorder()

    def graph_recorder(self) -> GraphRecorder:
        return self._recorder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    found = FakeRecorder()
    monkeypatch.setattr(RecordingPlatform, "_recorder", found)
    return found


def config(**compilation: Any) -> EngineConfig:
    return EngineConfig(
        compilation_config=CompilationConfig(**compilation),
        cache=CacheConfig(block_size=16, memory_bytes=16 << 20),
        dtype="float32",
        scheduler=SchedulerConfig(max_num_seqs=12),
    )


def answers(
    path: Any, prompts: list[list[int]], platform: CpuPlatform, given: EngineConfig
) -> list[CompletionOutput]:
    """Continue the prompts; the sequences end at different steps."""
    core = EngineCore(path, given, platform=platform)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True, logprobs=0)
        core.add_request(core.prepare(str(i), prompt, params))
    found: dict[str, CompletionOutput] = {}
    while core.has_unfinished:
        for output in core.step():
            found[output.request_id] = output.outputs[0]
    core.check_idle()
    return [found[str(i)] for i in range(len(prompts))]


def logprobs_of(answer: CompletionOutput) -> list[float]:
    places = zip(answer.token_ids, answer.logprobs or [], strict=True)
    return [place[token].logprob for token, place in places]


def tokens_of(answers: list[CompletionOutput]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def random_prompts() -> list[list[int]]:
    choose = random.Random(0)
    return [[choose.randrange(3, 90) for _ in range(choose.randrange(1, 30))] for _ in range(11)]


@pytest.mark.parametrize("kind", ["gemma3", "deepseek"])
def test_answers_are_those_without_graphs(
    kind: str, checkpoint: Checkpoints, recorder: FakeRecorder
) -> None:
    path, prompts = checkpoint(kind)[0], random_prompts()
    expected = answers(path, prompts, CpuPlatform(), config())
    assert not recorder.recordings
    found = answers(path, prompts, RecordingPlatform(), config())
    assert recorder.recordings == 4  # 1, 2, 4 and 8 sequences
    assert recorder.replays > 20
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-4)


def test_compiled_models_are_recorded(checkpoint: Checkpoints, recorder: FakeRecorder) -> None:
    path, prompts = checkpoint("llama")[0], random_prompts()[:5]
    compiled = {"mode": 3, "options": {"codegen": False}, "cudagraph_capture_sizes": [2, 3]}
    expected = answers(path, prompts, CpuPlatform(), config())
    found = answers(path, prompts, RecordingPlatform(), config(**compiled))
    assert recorder.recordings == 2
    assert recorder.replays > 5
    assert tokens_of(found) == tokens_of(expected)


def test_recurrent_models_are_not_recorded(
    checkpoint: Checkpoints, recorder: FakeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint("mamba2")[0]
    answers(path, random_prompts()[:2], RecordingPlatform(), config())
    assert not recorder.recordings
    assert "decode steps run without graphs: the model has recurrent layers" in caplog.text


def test_ranks_are_not_recorded(recorder: FakeRecorder, caplog: pytest.LogCaptureFixture) -> None:
    several = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    caches: Any = SimpleNamespace(states=None, backends={})

    def record(platform: CpuPlatform) -> object:
        return record_decode_graphs(
            lambda ids, positions: ids, caches, several, platform, 64, torch.device("cpu")
        )

    assert record(CpuPlatform()) is None
    assert "graphs" not in caplog.text  # CPUs have none
    assert record(RecordingPlatform()) is None
    assert not recorder.recordings
    assert "decode steps run without graphs: with tensor_parallel_size=2, ranks" in caplog.text


def test_a_progress_bar_counts_graphs(checkpoint: Checkpoints, recorder: FakeRecorder) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with ProgressBar("loading", then="warming up", console=console) as bar:
        EngineCore(checkpoint("llama")[0], config(), platform=RecordingPlatform(), progress=bar)
    assert recorder.recordings == 4
    assert re.search(r"recording graphs .*3/4", shown.getvalue())
    calls: list[tuple[int, int]] = []
    EngineCore(
        checkpoint("llama")[0],
        config(),
        platform=RecordingPlatform(),
        progress=lambda *call: calls.append(call),
    )
    done, total = calls[-1]
    assert done == total > 4  # tensors: a function is called for these only


class _CopiesItsCache(PagedAttention):
    name = "copies"

    def forward(self, metadata: Any, *inputs: Any, **options: Any) -> Tensor:
        self.key_cache = self.key_cache.clone()
        return super().forward(metadata, *inputs, **options)


class _WaitsForLengths(PagedAttention):
    name = "waits"

    def forward(self, metadata: Any, *inputs: Any, **options: Any) -> Tensor:
        RecordingPlatform._recorder.wait()
        return super().forward(metadata, *inputs, **options)


class _OwnAttention(RecordingPlatform):
    name = "own_attention"
    _backend: type[PagedAttention]

    def get_attn_backend_cls(self, spec: AttentionSpec) -> str:
        return f"{__name__}:{self._backend.__name__}"


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (_CopiesItsCache, "an attention backend does not update its cache in place"),
        (_WaitsForLengths, "operation not permitted when stream is capturing"),
    ],
)
def test_a_model_that_cannot_be_recorded_runs_without_graphs(
    backend: type[PagedAttention],
    reason: str,
    checkpoint: Checkpoints,
    recorder: FakeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, prompts = checkpoint("llama")[0], random_prompts()[:3]
    expected = answers(path, prompts, CpuPlatform(), config())
    monkeypatch.setattr(_OwnAttention, "_backend", backend, raising=False)
    with caplog.at_level(logging.WARNING):
        found = answers(path, prompts, _OwnAttention(), config())
    assert tokens_of(found) == tokens_of(expected)
    assert not recorder.replays
    assert f"cannot record them: {reason}" in caplog.text
    assert "cudagraph_capture_sizes=[]" in caplog.text


def test_sizes() -> None:
    assert decode_sizes(config()) == [1, 2, 4, 8]
    assert decode_sizes(config(cudagraph_capture_sizes="[1, 6, 40]")) == [1, 6]
    assert decode_sizes(config(cudagraph_capture_sizes="3,2")) == [2, 3]
    assert decode_sizes(config(cudagraph_capture_sizes=[])) == []
    many = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1000))
    assert decode_sizes(many) == [1, 2, 4, *range(8, 257, 8)]


@pytest.mark.parametrize("given", ["1,x", [0], [True], 8, [1.5], "-1"])
def test_invalid_sizes(given: Any) -> None:
    with pytest.raises(SettingError, match=r"cudagraph_capture_sizes=.* must be positive integers"):
        CompilationConfig(cudagraph_capture_sizes=given)
