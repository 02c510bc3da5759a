"""Decode steps from recorded graphs give the tokens of steps without graphs."""

from __future__ import annotations

import io
import logging
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.distributed import HashStore

from models.tiny_checkpoints import Checkpoints
from opweave.config import CompilationConfig, EngineConfig
from opweave.config.engine import CacheConfig, ParallelConfig, SchedulerConfig
from opweave.config.terminal import ProgressBar
from opweave.ir.errors import SettingError
from opweave.layers import TensorParallel
from opweave.platforms.base import AttentionSpec, GraphRecorder
from opweave.platforms.builtin import CpuPlatform
from opweave_engine import CompletionOutput, SamplingParams
from opweave_engine.attention import PagedAttention
from opweave_engine.core import EngineCore
from opweave_engine.decode_graphs import SequenceStep, decode_sizes, record_decode_graphs
from opweave_engine.errors import CommunicatorError
from opweave_engine.kv_cache import CachePlan
from opweave_engine.parallel.communicators import (
    Communicator,
    RankGroup,
    SharedMemoryCommunicator,
    TorchCommunicator,
)
from opweave_engine.parallel.rank import RankWorker, Start
from opweave_engine.sampling.sampler import SamplingRequest


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
    text = "decode steps run without graphs: with tensor_parallel_size=2, nothing says that graphs"
    assert text in caplog.text


# Two ranks in threads.


class Meeting:
    """Where two ranks exchange tensors; a rank that waits in vain gets an error.

    Attributes:
        log: the collectives of each rank: its tensor's shape.
    """

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._brought: list[Any] = [None, None]
        self.log: tuple[list[Any], list[Any]] = ([], [])

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        if getattr(_recording, "now", False):  # nothing moves until the replay
            return [x, x]
        self.log[rank].append(tuple(x.shape))
        self._brought[rank] = x
        self._barrier.wait()
        both = list(self._brought)
        self._barrier.wait()
        assert both[0].shape == both[1].shape, "the ranks call different collectives"
        return both

    def abort(self) -> None:
        self._barrier.abort()


_recording = threading.local()


class RankRecorder(FakeRecorder):
    """Does not run the collectives that it records, as CUDA does not."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        _recording.now = True
        try:
            return super().record(run)
        finally:
            _recording.now = False


class FailingRecorder(RankRecorder):
    """Fails in the n-th recording: in what comes before it, or in the recording."""

    def __init__(self, number: int, *, early: bool = False) -> None:
        super().__init__()
        self._number, self._early = number, early

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        fails = self.recordings + 1 == self._number
        if fails and self._early:
            raise RuntimeError("out of memory")
        replay = super().record(run)
        if fails:
            raise RuntimeError("out of memory")
        return replay


class ThreadCommunicator(Communicator):
    is_recordable = True

    @property
    def meeting(self) -> Meeting:
        meeting: Any = self.group.store
        return meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        one, other = self.meeting.exchange(self.group.rank, x)
        return one + other

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self.meeting.exchange(self.group.rank, x), dim)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        x.copy_(self.meeting.exchange(self.group.rank, x)[source])

    def barrier(self) -> None:
        self.meeting.exchange(self.group.rank, torch.empty(0))

    def close(self) -> None:
        self.meeting.abort()


class RankPlatform(RecordingPlatform):
    """A rank with a recorder of its own."""

    name = "rank"

    def __init__(self, recorder: FakeRecorder) -> None:
        self.recorder = recorder

    def graph_recorder(self) -> GraphRecorder:
        return self.recorder

    def get_device_communicator_cls(self) -> str:
        return f"{__name__}:ThreadCommunicator"


class Ranks:
    """Two ranks of an engine, in threads, that decode the same sequences."""

    def __init__(self, path: Any, recorders: list[FakeRecorder]) -> None:
        self.meeting, self._recorders = Meeting(), recorders
        given = replace(config(), parallel=ParallelConfig(tensor_parallel_size=2))
        store: Any = self.meeting
        self._ranks = [
            RankWorker(Start(i, 2, 0, path, given, 30.0, None), RankPlatform(recorder), store)
            for i, recorder in enumerate(recorders)
        ]
        for method in ("join", "load_model"):
            self.do(method)
        groups = len(self.do("facts")[0].groups)
        self.do("allocate", CachePlan((40,) * groups, 160, 16))

    def do(self, method: Any, *arguments: Any) -> list[Any]:
        def called(rank: RankWorker) -> Any:
            try:
                return rank.do(method, *arguments)
            except BaseException:
                self.meeting.abort()  # as the engine does if a rank fails
                raise

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(called, self._ranks))

    def runner(self, rank: int) -> Any:
        return self._ranks[rank].worker.runner

    def decode(self) -> list[list[int]]:
        """Return the tokens of three sequences after prompts of 1, 2 and 3 tokens."""
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        answers = [[3 + i for i in range(count)] for count in (1, 2, 3)]
        starts = [0, 0, 0]
        for _ in range(6):
            steps = [
                SequenceStep(str(i), answer[start:], start, ((i + 1,),), SamplingRequest(params, 0))
                for i, (answer, start) in enumerate(zip(answers, starts, strict=True))
            ]
            starts = [len(answer) for answer in answers]
            first, second = self.do("execute", steps)
            assert first == second
            for answer, sampled in zip(answers, first, strict=True):
                answer.append(sampled.token_id)
        return answers


@pytest.fixture
def expected_of_ranks(checkpoint: Checkpoints) -> list[list[int]]:
    ranks = Ranks(checkpoint("llama")[0], [FailingRecorder(1), FailingRecorder(1)])
    ranks.do("warm_up")
    return ranks.decode()


def test_ranks_record_the_same_graphs(
    checkpoint: Checkpoints, expected_of_ranks: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    recorders = [RankRecorder(), RankRecorder()]
    ranks = Ranks(checkpoint("llama")[0], recorders)
    ranks.do("warm_up")
    assert [each.recordings for each in recorders] == [4, 4]  # 8, 4, 2 and 1 sequences
    assert ranks.meeting.log[0] == ranks.meeting.log[1]
    # Each is run before it is recorded; then the ranks agree.
    sizes = [shape[0] for shape in ranks.meeting.log[0] if len(shape) == 2 and shape[0] > 1]
    assert [size for size, _ in groupby(sizes)] == [8, 4, 2]
    assert ranks.meeting.log[0].count((1,)) == 5
    assert ranks.decode() == expected_of_ranks
    assert [each.replays for each in recorders] == [5, 5]
    assert "without graphs" not in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [1, 3])
def test_no_rank_records_what_another_one_cannot(
    rank: int,
    number: int,
    checkpoint: Checkpoints,
    expected_of_ranks: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorders = [RankRecorder(), RankRecorder()]
    recorders[rank] = FailingRecorder(number)
    ranks = Ranks(checkpoint("llama")[0], recorders)
    ranks.do("warm_up")
    assert ranks.meeting.log[0] == ranks.meeting.log[1]
    assert ranks.decode() == expected_of_ranks
    assert not any(each.replays for each in recorders)
    assert "cannot record them: out of memory" in caplog.text
    assert "cannot record them: another rank cannot record them" in caplog.text


def test_a_rank_that_fails_before_a_recording_stops_the_engine(checkpoint: Checkpoints) -> None:
    ranks = Ranks(checkpoint("llama")[0], [FailingRecorder(2, early=True), RankRecorder()])
    with pytest.raises(CommunicatorError, match=r"rank 0 of 2: .*: out of memory. Try --enforce"):
        ranks.do("warm_up")


def test_a_cache_that_moves_on_one_rank(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last check of one rank comes after all recordings."""
    recorders = [RankRecorder(), RankRecorder()]
    ranks = Ranks(checkpoint("llama")[0], recorders)
    moves = ranks.runner(1)._caches.backends[0]
    forward = moves.forward

    def moving(*args: Any) -> Tensor:
        moves.key_cache = moves.key_cache.clone()
        return forward(*args)

    monkeypatch.setattr(moves, "forward", moving)
    ranks.do("warm_up")
    assert [each.recordings for each in recorders] == [4, 4]
    assert "does not update its cache in place" in caplog.text
    assert "another rank cannot record them" in caplog.text
    assert ranks.meeting.log[0] == ranks.meeting.log[1]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("kind", [TorchCommunicator, SharedMemoryCommunicator])
def test_communicators_declare_whether_graphs_contain_them(
    backend: str, kind: type[TorchCommunicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's collectives run on the device; those of gloo and of shared memory on the host."""
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    monkeypatch.setattr(TensorParallel, "from_process_group", TensorParallel)
    monkeypatch.setattr(SharedMemoryCommunicator, "_meet", lambda self: None)
    group = RankGroup(0, 2, torch.device("cpu"), backend, HashStore(), 1.0)
    reason = kind(group).tensor_parallel().unrecorded
    expected = f"{kind.__name__} with 'gloo' does not record collectives"
    assert reason == ("" if backend == "nccl" else expected)


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
