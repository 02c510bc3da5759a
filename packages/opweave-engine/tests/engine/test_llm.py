"""Outputs equal those of transformers, alone or batched, with any kernels."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import torch

from models.tiny_checkpoints import (
    BOS,
    EOS,
    VOCABULARY,
    YARN,
    Checkpoints,
    random_ids,
    write_checkpoint,
    write_tokenizer,
)
from opweave import ir
from opweave.config import EngineConfig, KernelConfig
from opweave_engine import (
    LLM,
    AsyncEngine,
    CheckpointError,
    EngineStats,
    InvalidArgumentError,
    NonFiniteLogitsError,
    PromptError,
    SamplingParams,
    SamplingParamsError,
    TokenizerError,
)
from opweave_engine import core as core_module
from opweave_engine.client import FairLock
from opweave_engine.metrics import KernelUse, SelectionReport, StatLogger
from opweave_engine.parallel.executor import InProcessExecutor
from support.processes import wait_until

PROMPTS = [random_ids(seed, count) for seed, count in enumerate([1, 7, 23, 2, 12])]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def llms(checkpoint: Checkpoints) -> Callable[[str], LLM]:
    built: dict[str, LLM] = {}

    def get(kind: str) -> LLM:
        if kind not in built:
            built[kind] = LLM(checkpoint(kind)[0])
        return built[kind]

    return get


@pytest.fixture
def llm(llms: Callable[[str], LLM]) -> LLM:
    return llms("llama")


def tokens(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def model_of(llm: LLM) -> torch.nn.Module:
    executor = llm._core.executor
    assert isinstance(executor, InProcessExecutor)
    return executor.worker.runner.model


def reference(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **options
    )
    result: list[int] = generated[0, len(prompt) :].tolist()
    return result


def test_the_context_is_as_long_as_the_rope_is_stretched(tmp_path: Path) -> None:
    """Qwen's recipe: max_position_embeddings is still the context of training."""
    recipe = {**YARN, "factor": 4.0, "original_max_position_embeddings": 32}
    model = write_checkpoint(tmp_path, "qwen2", max_position_embeddings=32, rope_parameters=recipe)
    llm, prompts = LLM(tmp_path), [random_ids(7, 100), random_ids(8, 31)]
    assert tokens(llm, prompts) == [reference(model, p, 14, eos_token_id=None) for p in prompts]
    with pytest.raises(PromptError, match=r"context is 128 tokens"):
        llm.generate([random_ids(9, 128)], GREEDY)


def test_text_prompts(checkpoint: Checkpoints, llm: LLM) -> None:
    texts = ["the quick brown", "naïve 東京", "x"]
    outputs = llm.generate(texts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    for text, output in zip(texts, outputs, strict=True):
        ids = llm.tokenizer.encode(text)
        assert output.prompt_token_ids == ids
        assert ids[0] == BOS
        (answer,) = output.outputs
        assert answer.token_ids == reference(checkpoint("llama")[1], ids, 14, eos_token_id=None)
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert (answer.index, answer.finish_reason) == (0, "length")
        assert 0 < output.timings.first_token <= output.timings.finished


def test_all_forms_of_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    ids = llm.tokenizer.encode("dog")
    one = tokens(llm, "dog", params)
    assert len(one) == 1
    assert tokens(llm, ids, params) == one
    assert tokens(llm, [ids, "dog"], params) == one * 2
    assert tokens(llm, (tuple(ids),), params) == one
    assert llm.generate([]) == []
    assert llm.generate(ids, params)[0].prompt is None
    assert len(tokens(llm, "dog", None)[0]) <= 16


def test_an_empty_prompt_is_the_token_that_begins_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    assert llm.generate([[]], params)[0].prompt_token_ids == [BOS]
    assert tokens(llm, "", params) == tokens(llm, [[BOS]], params)


def test_an_empty_prompt_without_such_a_token(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("llama")[0], tmp_path / "llama"))
    write_tokenizer(path, adds_bos=False)
    for name in ("config.json", "generation_config.json"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace('"bos_token_id": 1', '"bos_token_id": null'))
    (path / "tokenizer_config.json").unlink()
    llm = LLM(path)
    with pytest.raises(PromptError, match="no tokens"):
        llm.generate("")
    with pytest.raises(PromptError, match="no tokens"):
        llm.generate([[]])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5, VOCABULARY]], f"token id {VOCABULARY}.* from 0 to {VOCABULARY - 1}"),
        ([-1], "token id -1"),
        ([5] * 96, "has 96 tokens, but the context is 96.* by 1"),
        ([5] * 200, "has 200 tokens.*Shorten it by 105"),
        (7, "not int"),
        (None, "not NoneType"),
        ({"a": 1}, "has the fields 'a'"),
        ([None], "A prompt is None"),
        ([[1, "a"]], "A prompt is"),
        ([True], "A prompt is True"),
        ([1.0], "A prompt is 1.0"),
        (["a", 3], "A prompt is 3"),
        ("a\ud800", r"surrogate pair, '\\ud800' at 1"),
    ],
)
def test_wrong_prompts(prompts: Any, message: str, llm: LLM) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate(prompts)


@pytest.mark.parametrize("prompt", [["a", "b"], [True], None, [[5, 6]]])
def test_a_stream_of_what_is_no_prompt(prompt: Any, llm: LLM) -> None:
    with pytest.raises(PromptError, match="must be a string or a list of token ids"):
        next(llm.stream(prompt))
    with pytest.raises(SamplingParamsError, match="5, not SamplingParams"):
        next(llm.stream("a", 5))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [None, 5, b"model", ["model"]])
def test_a_model_that_is_no_path(model: Any) -> None:
    for kind in (LLM, AsyncEngine):
        with pytest.raises(CheckpointError, match="directory or GGUF file"):
            kind(model)


@pytest.mark.parametrize("params", [[SamplingParams()], "greedy", [1, 2], {"max_tokens": 2}])
def test_wrong_sampling_params(params: Any, llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"sampling_params"):
        llm.generate(["a", "b"], params)


def test_one_wrong_prompt_and_none_runs(llm: LLM) -> None:
    calls: list[tuple[int, int]] = []
    prompts: list[str | list[int]] = ["a", [-1]]
    with pytest.raises(PromptError):
        llm.generate(prompts, progress=lambda *call: calls.append(call))
    assert calls == []


def test_each_request_has_its_own_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
        GREEDY,
    ]
    together = tokens(llm, PROMPTS[:3], params)
    assert [len(ids) for ids in together] == [1, 9, 14]
    assert together == [tokens(llm, p, q)[0] for p, q in zip(PROMPTS, params, strict=False)]
    assert together[0] == tokens(llm, PROMPTS[0])[0][:1]


def test_the_context_ends_the_answer(checkpoint: Checkpoints, llm: LLM) -> None:
    prompt = random_ids(3, 90)
    for limit in (None, 50):
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        (answer,) = llm.generate(prompt, params)[0].outputs
        assert answer.token_ids == reference(checkpoint("llama")[1], prompt, 6, eos_token_id=None)
        assert answer.finish_reason == "length"
    assert len(tokens(llm, random_ids(3, 95), SamplingParams())[0]) == 1


def test_an_end_of_text_token_that_the_model_has_not_is_told(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(checkpoint("llama")[0], tmp_path / "llama"))
    (copy / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {VOCABULARY}]}}')
    LLM(copy)
    assert f"end-of-text tokens [{VOCABULARY}] are ignored" in caplog.text


def test_seeds(checkpoint: Checkpoints, llm: LLM) -> None:
    def params(seed: int | None) -> SamplingParams:
        return SamplingParams(temperature=1.5, seed=seed, max_tokens=12, ignore_eos=True)

    alone = tokens(llm, PROMPTS[1], params(4))
    assert alone == tokens(llm, PROMPTS[1], params(4))
    assert alone != tokens(llm, PROMPTS[1], params(5))
    many = [params(seed) for seed in (4, None, 9, None, 4)]
    batched = tokens(llm, [PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[1]], many)
    assert batched[0] == alone[0] == batched[4]
    assert batched[3] != alone[0]

    unseeded = [PROMPTS[1]] * 3
    path = checkpoint("llama")[0]
    first, again = (tokens(LLM(path, seed=8), unseeded, params(None)) for _ in range(2))
    assert first == again
    assert len({tuple(ids) for ids in first}) == 3  # requests differ from each other
    assert first != tokens(LLM(path, seed=9), unseeded, params(None))
    assert first == tokens(LLM(path, config=EngineConfig(seed=8)), unseeded, params(None))


def test_sampling_does_not_touch_the_global_generator(llm: LLM) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    llm.generate(PROMPTS, SamplingParams(max_tokens=3))
    assert torch.equal(before, torch.get_rng_state())


def test_progress(llm: LLM) -> None:
    calls: list[tuple[int, int]] = []
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 3, 2)]
    llm.generate(["a", "b", "c"], params, progress=lambda *call: calls.append(call))
    assert calls == [(3, 6), (5, 6), (6, 6)]  # tokens, of all that were asked for


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float32"}, InvalidArgumentError, "dtype is given twice: 'float32'.*'float16'"),
        ({"seed": 4}, ValueError, "seed is given twice: 4.* 3 in config"),
        ({"ir_op_priority": {"linear": ["native"]}}, ValueError, "'linear' is given twice"),
        ({"dtype": "int4", "config": None}, InvalidArgumentError, "'int4'.*auto, float32"),
        ({"seed": -1, "config": None}, InvalidArgumentError, "seed=-1"),
        ({"ir_op_priority": {"rms_nrom": ["native"]}}, ir.IrError, "Did you mean 'rms_norm'"),
        ({"ir_op_priority": {"rms_norm": ["no_such"]}}, ir.IrError, "no_such"),
    ],
)
def test_settings_that_contradict_or_are_unknown(
    options: dict[str, Any], error: type[Exception], message: str, checkpoint: Checkpoints
) -> None:
    config = EngineConfig(dtype="float16", seed=3, kernel_config=KernelConfig({"linear": "native"}))
    with pytest.raises(error, match=message):
        LLM(checkpoint("llama")[0], **{"config": config, **options})


def test_a_failed_request_leaves_the_answers_of_its_batch(
    checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(checkpoint("llama")[0])
    alone = llm.generate([[60, 61], [70, 71]], GREEDY)
    model_of(llm).model.embed_tokens.weight.data[7] = float("nan")
    bad = replace(GREEDY, logit_bias={7: 100.0})
    one, failed, other = llm.generate([[60, 61], [50, 51], [70, 71]], [GREEDY, bad, GREEDY])
    for found, expected in zip((one, other), alone, strict=True):
        assert (found.error, found.outputs[0].token_ids) == (None, expected.outputs[0].token_ids)
    assert isinstance(failed.error, NonFiniteLogitsError)
    assert failed.finished
    assert failed.outputs[0].finish_reason is None
    assert "1 of 3 requests failed" in caplog.text
    with pytest.raises(NonFiniteLogitsError):  # no answer is left
        llm.generate([[50, 51], [52, 53]], bad)
    llm._core.check_idle()


def test_a_checkpoint_without_a_tokenizer(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, model = checkpoint("llama")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(path / name, tmp_path)
    llm, whole = LLM(tmp_path), reference(model, PROMPTS[1], 14, eos_token_id=None)
    assert "prompts must be token ids" in caplog.text
    (answer,) = llm.generate(PROMPTS[1], GREEDY)
    assert answer.outputs[0].token_ids == whole
    assert answer.outputs[0].text == "".join(f"<{i}>" for i in whole)
    with pytest.raises(TokenizerError, match=r"give token ids instead of the text 'a'"):
        llm.generate("a")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": whole[2]}))
    (answer,) = LLM(tmp_path).generate(PROMPTS[1], replace(GREEDY, ignore_eos=False))
    assert answer.outputs[0].finish_reason == "stop"
    assert answer.outputs[0].token_ids == whole[: whole.index(whole[2]) + 1]


def test_the_log_says_once_which_kernels_run(
    checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "opweave_engine"):
        llm = LLM(checkpoint("llama")[0], ir_op_priority={"silu_and_mul": ["native"]})
        tokens(llm, PROMPTS)
    (record,) = (r for r in caplog.records if "kernels of the first forward" in r.message)
    lines = {line.split()[0]: line.split()[1] for line in record.message.splitlines()[1:]}
    assert lines["silu_and_mul"] == "native"
    assert lines["paged_attention"] == lines["reshape_and_cache"] == "opweave_c"
    assert {"rms_norm", "linear", "embedding", "rotary_embedding"} <= lines.keys()


def test_stat_loggers_are_told_every_step(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[EngineStats] = []

    class Logger(StatLogger):
        def record(self, stats: EngineStats) -> None:
            told.append(stats)

    monkeypatch.setattr(core_module, "stat_loggers", lambda config: [Logger(config)])
    tokens(LLM(checkpoint("llama")[0]), PROMPTS)
    assert [stats.steps for stats in told] == list(range(1, 15))
    assert [stats.generation_tokens for stats in told] == [5 * n for n in range(1, 15)]
    assert told[-1].finished == {"length": 5}


# Threads take turns with a language model


TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SIX = [random_ids(seed, 4 + seed) for seed in range(6)]


def test_who_waits_comes_before_who_has_just_had_a_turn() -> None:
    turns, order = FairLock(), []

    def wait() -> None:
        with turns.take():
            order.append("waited")

    with turns.take():
        thread = Thread(target=wait)
        thread.start()
        wait_until(turns._next.locked)
    with turns.take():
        order.append("again")
    thread.join()
    assert order == ["waited", "again"]


def test_what_is_for_soon_waits_for_no_turn() -> None:
    turns, done = FairLock(), []
    turns.soon(lambda: done.append("at once"))
    assert done == ["at once"]
    with turns.take():
        turns.soon(lambda: done.append("afterwards"))
        assert done == ["at once"]
    assert done == ["at once", "afterwards"]


def test_threads_get_their_own_answers(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama")[0])
    wanted = [output.outputs[0] for output in llm.generate(SIX, TEN)]
    execute, computes = llm._core.executor.execute, Lock()

    def alone(steps: Any) -> Any:
        assert computes.acquire(blocking=False), "two steps at once"
        try:
            time.sleep(0.001)  # the other threads go on
            return execute(steps)
        finally:
            computes.release()

    monkeypatch.setattr(llm._core.executor, "execute", alone)

    def ask(number: int) -> Any:
        if number % 2:
            return list(llm.stream(SIX[number], TEN))[-1].outputs[0]
        return llm.generate(SIX[number], TEN)[0].outputs[0]

    with ThreadPoolExecutor(len(SIX)) as pool:
        assert list(pool.map(ask, range(len(SIX)))) == wanted
    llm._core.check_idle()


def test_a_stream_that_is_collected_in_the_middle_of_a_step(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama")[0])
    stream = llm.stream(SIX[1], TEN)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    execute = llm._core.executor.execute

    def collect_once(steps: Any) -> Any:
        monkeypatch.setattr(llm._core.executor, "execute", execute)
        gc.collect()
        return execute(steps)

    monkeypatch.setattr(llm._core.executor, "execute", collect_once)
    assert len(llm.generate(SIX[2], TEN)[0].outputs[0].token_ids) == 10
    llm._core.check_idle()
    assert llm.stats().finished == {"abort": 1, "length": 1}


def test_a_shutdown_aborts_what_others_wait_for(checkpoint: Checkpoints) -> None:
    llm = LLM(checkpoint("llama")[0])
    stream = llm.stream(SIX[1], TEN)
    next(stream)
    llm.shutdown()
    (last,) = stream
    assert last.outputs[0].finish_reason == "abort"


# Which kernels forwards run: seen once for each size of a forward


def forward(usage: SelectionReport, tokens: int, provider: str = "native") -> None:
    x = torch.randn(tokens, 8)
    with ir.priority(relu2=[provider]), usage.watch(tokens):
        ir.ops.relu2(ir.ops.relu2(x))


def test_each_size_is_seen_once() -> None:
    usage = SelectionReport()
    for tokens in (5, 1, 4, 7, 5, 8, 1):
        forward(usage, tokens)
    assert usage.kernels == tuple(KernelUse("relu2", "native", size, 2) for size in (1, 4, 8))


def test_what_is_not_seen_is_not_recorded() -> None:
    usage = SelectionReport()
    forward(usage, 3)
    with ir.record() as record:
        forward(usage, 2)
    assert record.selected_impls == {"relu2": {"native": 2}}
    with usage.watch(2):
        ir.ops.silu_and_mul(torch.randn(2, 8))
    assert {use.op for use in usage.kernels} == {"relu2"}


def test_a_forward_that_fails_is_seen_when_it_is_tried_again() -> None:
    usage = SelectionReport()
    with pytest.raises(ZeroDivisionError), usage.watch(2):
        raise ZeroDivisionError
    assert usage.kernels == ()
    forward(usage, 2)
    assert usage.kernels == (KernelUse("relu2", "native", 2, 2),)
