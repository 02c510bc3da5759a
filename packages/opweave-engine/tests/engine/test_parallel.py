"""Two ranks give the same tokens as one, and a failing rank never causes a hang."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from engine.test_equality import FAMILIES
from models.tiny_checkpoints import Checkpoints, random_ids
from opweave import ir
from opweave.config import CacheConfig, EngineConfig, ParallelConfig
from opweave.ir.errors import UnknownProviderError
from opweave.layers import TensorParallel, tensor_parallel
from opweave.layers.registry import ShardingError
from opweave.platforms import CpuPlatform
from opweave_engine import (
    LLM,
    AsyncEngine,
    Embedder,
    EngineDeadError,
    RankFailedError,
    SamplingParams,
)
from opweave_engine.errors import InvalidArgumentError
from opweave_engine.load.loader import load_model
from opweave_engine.parallel.executor import HOST, Process, RankedExecutor
from opweave_engine.parallel.rank import AGREED, Agreement, Launch, Start, follow, launch_of
from support.fixtures import FreshPython
from support.processes import is_alive, wait_until

SOON = 10.0  # seconds; most of them for a machine that is busy
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, seed=3, max_tokens=12, repetition_penalty=1.2, logprobs=2
)
PROMPTS = [random_ids(seed, count) for seed, count in enumerate([1, 7, 23, 2, 40])]
# Chunks of prompts, and preemption.
CACHE = CacheConfig(block_size=16, num_blocks=8)


def two_ranks(**changes: Any) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=2, timeout=changes.pop("timeout", 60.0))
    return EngineConfig(cache=CACHE, parallel=parallel, **changes)


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def executor_of(engine: LLM | AsyncEngine) -> RankedExecutor:
    found = engine._core.executor
    assert isinstance(found, RankedExecutor)
    return found


def pid_of(engine: LLM | AsyncEngine) -> int:
    (process,) = executor_of(engine)._peers.processes.values()
    return process.pid


def test_a_dense_model_until_a_rank_fails(checkpoint: Checkpoints) -> None:
    path = checkpoint("llama")[0]
    alone = LLM(path)
    # The order of another op's providers, so that the other rank must be told.
    llm = LLM(path, config=two_ranks(), ir_op_priority={"silu_and_mul": ["native"]})
    pid = pid_of(llm)
    assert executor_of(llm)._rank.communicator._segment is not None  # type: ignore[union-attr]
    assert tokens(llm) == tokens(alone)
    assert tokens(llm, DRAWN) == tokens(alone, DRAWN)
    assert llm.stats().preemptions > 0
    llm._core.check_idle()
    executor_of(llm)._peers.call("allocate", None)
    with pytest.raises(RankFailedError, match=r"rank 1 failed: AttributeError: 'NoneType'"):
        tokens(llm)
    wait_until(lambda: not is_alive(pid), SOON)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        tokens(llm)
    assert not torch.distributed.is_initialized()


def test_a_mixture_of_experts_until_a_rank_is_killed(checkpoint: Checkpoints) -> None:
    path = checkpoint("mixtral_window")[0]
    wanted = tokens(LLM(path))

    async def answer(engine: AsyncEngine, name: int, kills: bool) -> list[int]:
        found: list[int] = []
        async for output in engine.generate(PROMPTS[name], GREEDY, request_id=f"{name} {kills}"):
            found = output.outputs[0].token_ids
            if kills:
                os.kill(pid_of(engine), signal.SIGKILL)
        return found

    async def run(engine: AsyncEngine) -> None:
        answers = [answer(engine, name, kills=False) for name in range(len(PROMPTS))]
        assert await asyncio.gather(*answers) == wanted
        assert engine.is_running
        with pytest.raises(EngineDeadError, match="rank 1 died: it was killed by SIGKILL"):
            await answer(engine, 0, kills=True)
        assert not engine.is_running
        assert isinstance(engine.dead_with, RankFailedError)

    engine = AsyncEngine(path, config=two_ranks())
    try:
        asyncio.run(asyncio.wait_for(run(engine), 60))
    finally:
        engine.shutdown()


def test_a_rank_that_hangs_and_one_that_dies_while_nothing_is_computed(
    checkpoint: Checkpoints,
) -> None:
    path = checkpoint("one_layer")[0]
    llm = LLM(path, config=two_ranks())
    # Not when it loads, which takes longer on a machine that is busy.
    llm._core.executor._rank.communicator._segment.timeout = 2.0  # type: ignore[attr-defined]
    pid = pid_of(llm)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 0 waited 2 s for rank 1"):
        tokens(llm)
    assert time.monotonic() - began < SOON
    wait_until(lambda: not is_alive(pid), SOON)
    llm.shutdown()
    engine = AsyncEngine(path, config=two_ranks())
    os.kill(pid_of(engine), signal.SIGKILL)
    wait_until(lambda: not engine.is_running, SOON)
    assert isinstance(engine.dead_with, RankFailedError)
    engine.shutdown()


def test_an_engine_shuts_down_while_a_rank_hangs(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opweave_engine.async_engine._STOP_SECONDS", 0.1)
    monkeypatch.setattr("opweave_engine.client._ABORT_TIMEOUT_SECONDS", 0.1)
    engine = AsyncEngine(checkpoint("one_layer")[0], config=two_ranks())
    pid = pid_of(engine)

    async def run() -> None:
        stream = engine.generate(PROMPTS[0], GREEDY, request_id="a")
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(anext(stream))
        while not engine.stats().running:
            await asyncio.sleep(0.01)
        await engine.drain(0)
        with pytest.raises(EngineDeadError):
            await asked

    asyncio.run(asyncio.wait_for(run(), SOON))
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began < SOON  # and not the minute that ranks wait for each other
    wait_until(lambda: not is_alive(pid), SOON)
    assert "have not finished the step: 1" in str(engine.dead_with)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, checkpoint: Checkpoints) -> None:
    """Functional collectives are traced, and divided over tokens where that pays."""
    path = checkpoint("one_layer")[0]
    llm = LLM(path, config=two_ranks(compilation_config={"mode": 3, "backend": backend}))
    assert tokens(llm) == tokens(LLM(path))
    llm.shutdown()


# The engine runs in a process of its own, which a signal ends.
ENDING = """
    import os, signal, sys
    from opweave.config import EngineConfig, ParallelConfig
    from opweave_engine import LLM, SamplingParams
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may have changed it
    llm = LLM({path!r}, config=EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2)))
    print(*(p.pid for p in llm._core.executor._peers.processes.values()), flush=True)
    steps = 0
    def stop(done, most):
        global steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.{signal})
    llm.generate([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True), progress=stop)
"""


@pytest.mark.parametrize(
    ("signal_", "code"), [("SIGKILL", -9), pytest.param("SIGINT", -2, marks=pytest.mark.slow)]
)
def test_no_rank_outlives_the_engine(
    signal_: str, code: int, checkpoint: Checkpoints, fresh_python: FreshPython
) -> None:
    program = ENDING.format(path=str(checkpoint("one_layer")[0]), signal=signal_)
    ended = fresh_python(program, check=False, warm=False)
    assert ended.returncode == code, ended.stderr
    (pid,) = map(int, ended.stdout.split())
    wait_until(lambda: not is_alive(pid), SOON)


def test_a_rank_that_never_met_its_engine_does_not_outlive_it(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    process = Process(port)  # where nobody is any more
    try:
        process.connection.send_bytes(Agreement.here().to_json().encode())
        assert process.connection.recv_bytes() == AGREED
        process.connection.send(Start(1, 2, 0, tmp_path, two_ranks(), 60.0, None))
        process.connection.close()
        assert process.end(6 * SOON) == "exited with code 1"
    finally:
        process.kill()
    ours, its = multiprocessing.Pipe()
    ours.close()  # before the agreement
    with ThreadPoolExecutor(1) as thread:  # a main thread would ignore Ctrl-C from then on
        assert thread.submit(follow, its, HashStore).result() == 1


def refused(monkeypatch: pytest.MonkeyPatch, path: Path, **changes: Any) -> str:
    """Return the error of an engine whose second rank is told *changes*."""
    agreement = replace(Agreement.here(), **changes)
    monkeypatch.setattr(Agreement, "here", lambda: agreement)
    with pytest.raises(RankFailedError) as found:
        LLM(path, config=two_ranks())
    return str(found.value)


def test_a_rank_that_would_be_on_another_platform_refuses(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import opweave.platforms as p; p.resolution()")
    monkeypatch.syspath_prepend(tmp_path)
    platform = json.loads(Agreement.here().platform)
    platform["claim"]["platform"] = "opweave.platforms.builtin.XpuPlatform"
    error = refused(monkeypatch, checkpoint("one_layer")[0], platform=json.dumps(platform))
    assert "rank 1 refused to start: PlatformMismatchError: the parent process runs on " in error
    assert (
        "XpuPlatform, but this process has resolved opweave.platforms.builtin.CpuPlatform" in error
    )


def test_what_ranks_agree_on() -> None:
    with ir.priority(rms_norm=["native", "aten"]), ir.require("batch_invariant"):
        agreement = Agreement.from_json(Agreement.here().to_json())
    assert agreement.priorities["rms_norm"][:2] == ["native", "aten"]
    assert agreement.required == ["batch_invariant"]
    with agreement.selection():
        assert ir.ops.rms_norm.get_priority() == agreement.priorities["rms_norm"]
    with pytest.raises(RankFailedError, match="plugins absent; this process finds"):
        replace(agreement, plugins=["absent"]).impose()
    with pytest.raises(RankFailedError, match=r"speaks version 0 .*this process speaks 1"):
        Agreement.from_json(replace(agreement, protocol=0).to_json())
    lists = {op: names for op, names in agreement.priorities.items() if op != "rms_norm"}
    with (
        pytest.raises(RankFailedError, match=r"tries none for op 'rms_norm'; this process tries"),
        replace(agreement, priorities=lists).selection(),
    ):
        pass
    lists = {**agreement.priorities, "rms_norm": ["absent", "native"]}
    with (
        pytest.raises(UnknownProviderError, match="'absent'"),
        replace(agreement, priorities=lists).selection(),
    ):
        pass


def test_more_ranks_than_heads(
    tmp_path: Path, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said before any process is started, and names what a user of the engine can do."""

    def never(*_: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr("opweave_engine.parallel.executor.Process", never)
    config = json.loads((checkpoint("one_layer")[0] / "config.json").read_text())
    config |= {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = r"=3 cannot be divided over 2 .*; use a number of ranks that divides it\.$"
    with pytest.raises(ShardingError, match=message):
        LLM(tmp_path, config=two_ranks(load_format="dummy"))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_that_cannot_be_divided_says_what_cannot(
    kind: str, checkpoint: Checkpoints
) -> None:
    def never(x: Tensor, dim: int = -1) -> Tensor:
        raise AssertionError("no collective while a model is built")

    for ranks in (3, 16):
        refused = pytest.raises(
            ShardingError, match=rf"=\d+ cannot be divided over {ranks} tensor-"
        )
        with refused, tensor_parallel(TensorParallel(ranks - 1, ranks, never, never)):
            load_model(checkpoint(kind)[0])


def test_an_engine_that_does_not_start_leaves_nothing(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after all ranks have loaded their part of the model."""
    pids: list[int] = []

    def fail(executor: RankedExecutor, *_: Any) -> None:
        pids.extend(process.pid for process in executor._peers.processes.values())
        raise MemoryError

    monkeypatch.setattr(RankedExecutor, "allocate", fail)
    with pytest.raises(MemoryError):
        LLM(checkpoint("one_layer")[0], config=two_ranks())
    assert len(pids) == 1
    wait_until(lambda: not is_alive(pids[0]), SOON)
    assert not torch.distributed.is_initialized()


def test_an_encoder_has_one_rank(checkpoint: Checkpoints) -> None:
    with pytest.raises(InvalidArgumentError, match="tensor_parallel_size=2, but an encoder"):
        Embedder(checkpoint("bert")[0], config=two_ranks())


def test_the_other_ranks_are_on_the_current_platform(checkpoint: Checkpoints) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'cpu' was given.*OPWEAVE_PLATFORM"):
        RankedExecutor(checkpoint("one_layer")[0], two_ranks(), CpuPlatform())


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Launch.from_environment({}) is None
    assert Launch.from_environment(LAUNCHED | {"WORLD_SIZE": "1"}) is None
    assert Launch.from_environment(LAUNCHED) == Launch(1, 2, 1, 2, "localhost")
    for wrong in ({"RANK": "one"}, {"MASTER_ADDR": None}):
        given = {name: value for name, value in (LAUNCHED | wrong).items() if value is not None}
        with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
            Launch.from_environment(given)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert launch_of(2) == Launch(1, 2, 1, 2, "localhost")
    assert launch_of(1) is None
    with pytest.raises(InvalidArgumentError, match=r"2 processes.*tensor_parallel_size is 4"):
        launch_of(4)


@pytest.mark.parametrize(
    ("address", "host", "networks", "variable", "shown"),
    [
        ("10.0.0.1", "127.0.1.1", ("a", "b"), "", "rank 0: its host name 'node' resolves to the"),
        ("10.0.0.1", None, ("a", "b"), "", "GLOO_SOCKET_IFNAME"),
        ("127.0.1.1", "127.0.1.1", ("a", "b"), "eth0", "MASTER_ADDR='127.0.1.1' is the loopback"),
        ("10.0.0.1", "127.0.1.1", ("a", "b"), "eth0", None),
        ("10.0.0.1", "0.0.0.0", ("a", "b"), "", None),
        ("127.0.0.1", "127.0.1.1", ("a", "a"), "", None),
    ],
)
def test_other_machines_are_not_sent_a_loopback_address(
    address: str,
    host: str | None,
    networks: tuple[str, str],
    variable: str,
    shown: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(name: str, *_: Any, type: int) -> list[Any]:
        assert name == "node"
        if host is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, type, 6, "", (host, 0))]

    def outcome(rank: int) -> str | None:
        try:
            Launch(rank, 2, 0, 1, address).check_addresses(store, 10.0, "cpu:gloo")
        except InvalidArgumentError as error:
            return str(error)
        return None

    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("opweave_engine.parallel.rank._network", iter(networks).__next__)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    store = HashStore()
    with ThreadPoolExecutor(2) as ranks:
        outcomes = list(ranks.map(outcome, range(2)))
    assert outcomes[0] == outcomes[1]  # no rank waits for the other one
    assert outcomes[0] is None if shown is None else shown in str(outcomes[0])


def test_torchrun(checkpoint: Checkpoints, fresh_python: FreshPython) -> None:
    """Both ranks run the same command; the first one prints."""
    path = checkpoint("one_layer")[0]
    options = ["--prompt=hello", "--max-tokens=6", "--json", "--tensor-parallel-size=2"]
    code = f"from opweave.cli.app import main; main({['generate', str(path), *options]})"
    launched = fresh_python(
        f"""
        import sys
        from torch.distributed.run import main
        main(["--nproc-per-node=2", "--standalone", "--no-python", sys.executable, "-c", {code!r}])
        """
    )
    found = json.loads(launched.stdout)
    (output,) = LLM(path).generate("hello", SamplingParams(temperature=0, max_tokens=6))
    assert found["outputs"][0]["token_ids"] == output.outputs[0].token_ids
