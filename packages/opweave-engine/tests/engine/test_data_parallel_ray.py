"""Replicas that are actors of Ray, on this machine: the same tokens, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from opweave import ir
from opweave.config import EngineConfig, KernelConfig, ParallelConfig
from opweave.ir.errors import SettingError
from opweave_engine import (
    LLM,
    CompletionOutput,
    DataParallelEngine,
    EngineDeadError,
    InvalidArgumentError,
    RequestOutput,
    SamplingParams,
    open_engine,
)
from opweave_engine.parallel.ray import SETTINGS, RayGroup
from server.command import Command
from server.fake_engine import CHECKPOINT
from support.fixtures import FreshPython
from support.processes import is_alive, wait_until

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install 'opweave-engine[ray]'")

pytestmark = pytest.mark.timeout(200)
PROMPTS = [f"Return the {word}" for word in ("list", "name", "first", "value of", "path", "sum")]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, n=2, logprobs=2)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@contextmanager
def rays_leftovers() -> Iterator[None]:
    """Let Ray drop what it has started without a warning from the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray of two workers, and its address."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            with rays_leftovers():
                context = ray.init(
                    address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
                    logging_level="ERROR", object_store_memory=80 * 2**20,
                )  # fmt: skip
            yield context.address_info["gcs_address"]
        finally:
            with rays_leftovers():
                ray.shutdown()
            signal.signal(signal.SIGTERM, handler)


async def until(happened: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, happened)


def expected() -> dict[str, list[list[CompletionOutput]]]:
    llm = LLM(CHECKPOINT, dtype="float32")
    return {
        "greedy": [each.outputs for each in llm.generate(PROMPTS, GREEDY)],
        "drawn": [each.outputs for each in llm.generate(PROMPTS, DRAWN)],
    }


def pids(engine: DataParallelEngine) -> list[int]:
    places = [member.place for member in engine._replicas.members]
    return [place.pid for place in places if place is not None]


async def answer(
    engine: DataParallelEngine, name: str, prompt: str, params: SamplingParams
) -> RequestOutput:
    before = ""
    async for output in engine.generate(prompt, params, request_id=name):
        text = output.outputs[0].text
        assert text.startswith(before)
        before = text
    return output


def test_an_engine_until_a_replica_is_killed(cluster: str) -> None:
    wanted = expected()
    made = open_engine(
        CHECKPOINT,
        config=EngineConfig(
            dtype="float32",
            parallel=ParallelConfig(data_parallel_size=2),
            kernel_config=KernelConfig(ir_op_priority={"silu_and_mul": ["native"]}),
        ),
    )
    assert isinstance(made, DataParallelEngine)
    engine, first = made, pids(made)

    async def work() -> None:
        for kind, params in (("greedy", GREEDY), ("drawn", DRAWN)):
            found = await asyncio.gather(
                *(answer(engine, f"{kind} {i}", text, params) for i, text in enumerate(PROMPTS))
            )
            for one, other in zip(found, wanted[kind], strict=True):
                assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other]
                assert [a.text for a in one.outputs] == [a.text for a in other]
        shares = [member.stats.generation_tokens for member in engine._replicas.members]
        assert min(shares) >= 3 * 12, shares
        stream: Any = engine.generate("x", LONG, request_id="left")
        async with aclosing(stream):
            await anext(stream)
        await until(lambda: not engine._unfinished)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage, stats.replicas) == (0, 0, 0.0, 2)
        await kill_one()

    async def kill_one() -> None:
        os.kill(first[0], signal.SIGSTOP)  # so that it surely has requests when it dies
        tasks = [
            asyncio.create_task(answer(engine, f"{i}", text, GREEDY))
            for i, text in enumerate(PROMPTS)
        ]
        await until(lambda: engine._router.loads == [3, 0])
        os.kill(first[0], signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [each for each in results if isinstance(each, EngineDeadError)]
        assert len(lost) == 3
        assert "replica 0 died" in str(lost[0])
        assert engine.is_running
        await answer(engine, "meanwhile", "x", GREEDY)
        await until(lambda: engine.stats().replicas == 2)
        found = [await answer(engine, f"then {i}", text, GREEDY) for i, text in enumerate(PROMPTS)]
        for one, other in zip(found, wanted["greedy"], strict=True):
            assert one.outputs[0].token_ids == other[0].token_ids
        assert len({*pids(engine), *first}) == 3

    processes = first
    try:
        asyncio.run(asyncio.wait_for(work(), 150))
        processes = [*first, *pids(engine)]
    finally:
        engine.shutdown()
    wait_until(lambda: not any(map(is_alive, processes)))
    assert ray.is_initialized()  # it is not the engine's


def test_serve_until_sigterm(cluster: str, tmp_path: Path) -> None:
    wait_until(lambda: ray.available_resources().get("CPU") == 2.0)  # of the engine before
    command = Command(
        tmp_path, str(CHECKPOINT), "--port=0", "--dtype=float32", "--data-parallel-size=2",
        f"--data-parallel-address={cluster}", "--ir-op-priority.rms_norm=aten,native",
    )  # fmt: skip
    processes = [int(pid) for pid in re.findall(r"process (\d+) on", command.log.read_text())]
    try:
        post = command.client.post
        with ThreadPoolExecutor(4) as pool:
            body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
            asked = [
                pool.submit(post, "/v1/completions", json={**body, "prompt": text})
                for text in PROMPTS
            ]
            texts = [each.result().json()["choices"][0]["text"] for each in asked]
            with ir.priority(rms_norm=["aten", "native"]):
                llm = LLM(CHECKPOINT, dtype="float32")
                assert texts == [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY)]
            assert 'opweave_num_replicas{model_name="tiny-pydoc"} 2.0' in (
                command.client.get("/metrics").text
            )
        events = command.stop_while_it_streams(lambda: command.process.send_signal(signal.SIGTERM))
        assert events[-2] == "data: [DONE]"
        assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"
    finally:
        code = command.close()
    log = command.log.read_text()
    assert code == 0, log
    assert len(processes) == 2
    wait_until(lambda: not any(map(is_alive, processes)))
    # The kernels that the command line asks for are those of the replicas.
    assert re.findall(r"replica \d: kernels of the first forward", log)
    assert re.findall(r"rms_norm +aten", log)
    assert "Traceback" not in log
    assert "ray" not in log.lower().replace("array", "")


def test_a_cluster_without_room(cluster: str) -> None:
    config = EngineConfig(parallel=ParallelConfig(data_parallel_size=3))
    with pytest.raises(InvalidArgumentError, match=r"=3: each replica needs 1 CPU.*have: 2 CPU"):
        open_engine(CHECKPOINT, config=config)


ALONE = """
    import os, sys, threading, time
    from opweave.config import EngineConfig, ParallelConfig
    from opweave_engine import open_engine
    config = EngineConfig(parallel=ParallelConfig(data_parallel_size=2))
    if __name__ == "__main__":
        engine = open_engine({path!r}, config=config)
        print(*[member.place.pid for member in engine._replicas.members], flush=True)
        {ending}
"""


def of_ray() -> list[str]:
    """Return the programs of Ray that run and are not this process's."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            words = (each / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if words and (words[0].startswith(b"ray::") or words[0].endswith(b"/raylet")):
            found.append(each.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code"), [("engine.shutdown()", 0), ("", 0), ("os.kill(os.getpid(), 9)", -9)]
)
def test_nothing_outlives_the_program_that_starts_ray(
    ending: str, code: int, fresh_python: FreshPython
) -> None:
    before = set(of_ray())
    ended = fresh_python(ALONE.format(path=str(CHECKPOINT), ending=ending), check=False, warm=False)
    assert ended.returncode == code, ended.stderr
    first, second = map(int, ended.stdout.split())
    wait_until(lambda: not is_alive(first) and not is_alive(second))
    # Ray's agents take a minute to find out that the program was killed.
    wait_until(lambda: set(of_ray()) <= before, 120)
    assert "ray" not in ended.stderr.lower()


@pytest.mark.parametrize("source", ["setting", "environment"])
def test_an_address_where_nothing_is(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it would try for minutes"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    given = None
    if source == "setting":
        given = address
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_address=given)
    with pytest.raises(InvalidArgumentError, match=rf"Ray cannot be used at '{address}'.*refused"):
        RayGroup(parallel)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(SettingError, match="on a machine of the cluster"):
        RayGroup(ParallelConfig(data_parallel_size=2))


RANKED = """
    import asyncio, json
    from opweave.config import EngineConfig, ParallelConfig
    from opweave_engine import SamplingParams, open_engine

    async def answer(name, prompt):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = engine.generate(prompt, params, request_id=str(name))
        return [output.outputs[0].token_ids async for output in outputs][-1]

    async def work():
        return await asyncio.gather(*(answer(*each) for each in enumerate({prompts!r})))

    sizes = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    engine = open_engine({path!r}, config=EngineConfig(dtype="float32", parallel=sizes))
    print(json.dumps(asyncio.run(work())), flush=True)
    engine.shutdown()
"""


@pytest.mark.slow
def test_replicas_of_two_ranks(fresh_python: FreshPython) -> None:
    code = RANKED.format(path=str(CHECKPOINT), prompts=PROMPTS)
    found = json.loads(fresh_python(code, warm=False).stdout)
    assert found == [each[0].token_ids for each in expected()["greedy"]]


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_finishes_what_was_accepted(tmp_path: Path) -> None:
    """It reaches all processes of the terminal, those of Ray included."""
    command = Command(
        tmp_path, str(CHECKPOINT), "--port=0", "--data-parallel-size=2", is_leader=True
    )  # fmt: skip
    try:
        events = command.stop_while_it_streams(
            lambda: os.killpg(command.process.pid, signal.SIGINT)
        )
        assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"
    finally:
        code = command.close()
    assert code == 0, command.log.read_text()
