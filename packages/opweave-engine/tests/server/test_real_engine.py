"""The server over the real engine: every option, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from opweave.plugins import loader
from opweave.plugins.discovery import PluginPolicy
from opweave.plugins.loader import Loader
from opweave_engine import LLM, SamplingParams
from plugins import helpers
from server.conftest import Running, Start, events, texts_of
from server.fake_engine import CHECKPOINT, FakeEngine
from server.test_openai_client import EXTENSIONS, OPTIONS
from support.processes import wait_until

PATH = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_answers_with_every_option_are_those_of_the_library(
    real: Running, llm: LLM, kind: str, stream: bool
) -> None:
    options: Any = {**OPTIONS, **EXTENSIONS, "max_tokens": 12, "stream": stream}
    biases = {int(token): bias for token, bias in OPTIONS["logit_bias"].items()}
    text = "Return the"
    if kind == "chat":
        text = "<s>[user]Return the[assistant]"
        options["messages"] = [{"role": "user", "content": "Return the"}]
    else:
        options["prompt"] = text
    ids = llm.tokenizer.encode(text, add_special_tokens=kind != "chat")
    params = SamplingParams(max_tokens=12, **{**OPTIONS, **EXTENSIONS, "logit_bias": biases})
    expected = [answer.text for answer in llm.generate(ids, params)[0].outputs]
    client = real.openai()
    create: Any = client.chat.completions if kind == "chat" else client.completions
    extra = {name: options.pop(name) for name in EXTENSIONS}
    answers = create.create(model="tiny-pydoc", extra_body=extra, **options)
    assert texts_of(answers, stream=stream) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_prompt_and_its_answer(real: Running, llm: LLM, stream: bool) -> None:
    answers: Any = real.openai().completions.create(
        model="tiny-pydoc", prompt="Return the", max_tokens=6, temperature=0, logprobs=3,
        echo=True, stream=stream,
    )  # fmt: skip
    choices = [answer.choices[0] for answer in (answers if stream else [answers])]
    found: dict[str, list[Any]] = {}
    for choice in choices:
        if choice.logprobs is not None:
            for name, values in choice.logprobs.model_dump().items():
                found.setdefault(name, []).extend(values)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=3)
    (output,) = llm.generate("Return the", params)
    (answer,) = output.outputs
    ids = [*output.prompt_token_ids, *answer.token_ids]
    places = [*output.prompt_logprobs, *answer.logprobs]
    wanted = [place and place[token].logprob for token, place in zip(ids, places, strict=True)]
    assert found["token_logprobs"] == pytest.approx(wanted, abs=1e-4)
    wanted = [
        place and 3 + (place[token].rank > 3) for token, place in zip(ids, places, strict=True)
    ]
    assert [top and len(top) for top in found["top_logprobs"]] == wanted
    text = "".join(choice.text for choice in choices)
    assert text == "Return the" + answer.text


@pytest.mark.parametrize("prompt", ["é—x", "<s>é</s>x", [0, 5, 1, 6], ""])
def test_places_of_tokens_are_those_in_the_text(real: Running, prompt: Any) -> None:
    body = {
        "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 24, "temperature": 0.9,
        "seed": 4, "stop": ["e not", "~"], "n": 2, "ignore_eos": True,
    }  # fmt: skip
    plain = real.post(PATH, body).json()["choices"]
    chunks = events(real.post(PATH, {**body, "stream": True}))
    for choice in plain:
        found, text = choice["logprobs"], choice["text"]
        pieces = [
            each["choices"][0]["logprobs"]
            for each in chunks
            if each["choices"][0]["index"] == choice["index"] and each["choices"][0]["logprobs"]
        ]
        for name in ("tokens", "text_offset"):
            assert [value for piece in pieces for value in piece[name]] == found[name]
        assert found["text_offset"] == sorted(found["text_offset"])
        for token, place in zip(found["tokens"], found["text_offset"], strict=True):
            is_text = not token.startswith("bytes:") and token not in ("<s>", "</s>")
            if is_text and place < len(text):
                assert token.startswith(text[place : place + len(token)])


def test_many_streams_with_random_disconnects_leave_nothing(real: Running) -> None:
    draw = random.Random(1)

    async def one(client: httpx.AsyncClient, number: int, lives: float) -> None:
        body = {"prompt": f"def f{number}", "max_tokens": 40, "ignore_eos": True, "stream": True}
        try:
            async with asyncio.timeout(lives):
                async with client.stream("POST", PATH, json=body) as answer:
                    assert answer.status_code == 200
                    text = "".join([piece async for piece in answer.aiter_text()])
                    assert text.endswith("data: [DONE]\n\n")
        except TimeoutError:
            return

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=None)
        client = httpx.AsyncClient(
            base_url=real.url, limits=limits, timeout=60, verify=False, trust_env=False
        )
        lives = [draw.choice([60.0, draw.uniform(0.05, 2.0)]) for _ in range(200)]
        async with client:
            await asyncio.gather(*(one(client, i, life) for i, life in enumerate(lives)))

    asyncio.run(all_of_them())

    def is_idle() -> bool:
        stats = real.engine.stats()
        return stats.running == stats.waiting == 0

    wait_until(is_idle)
    wait_until(lambda: real.state.admission.active == 0)
    assert real.engine.stats().kv_usage == 0
    core: Any = real.engine
    core._core.check_idle()  # every block is free, and the books agree
    assert real.post(PATH, {"prompt": "x", "max_tokens": 2}).status_code == 200


METRICS = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
    "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "e2e_request_latency_seconds", "iteration_tokens", "op_selection_info", "plugin_info",
    "compile_seconds", "engine_step_seconds", "engine_steps", "op_calls", "http_requests",
    "http_request_duration_seconds",
}  # fmt: skip


def test_the_metrics_and_what_ran(
    real: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {helpers.GENERAL: {"quiet": "quiet_module:register"}}
    helpers.install(tmp_path, helpers.files("quiet", points, "def register(): pass\n"))
    monkeypatch.setattr(loader, "_loader", Loader(helpers.points_in(tmp_path), PluginPolicy()))
    real.post(PATH, {"prompt": "Return the", "max_tokens": 4})
    layers = json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"]
    ops = {each["op"]: each for each in real.get("/v1/ops").json()["data"]}
    ran = ops["silu_and_mul"]["ran"]
    assert {each["calls"] for each in ran} == {layers}
    assert {each["provider"] for each in ran} == {ops["silu_and_mul"]["preferred"]}
    assert 1 in {each["tokens"] for each in ran}
    assert sum(each["calls"] for each in ops["fused_add_rms_norm"]["ran"]) == 2 * layers * len(ran)
    assert ops["relu2"]["ran"] == []
    families = list(text_string_to_metric_families(real.get("/metrics").text))
    found = {family.name.removeprefix("opweave_") for family in families if family.samples}
    assert {f"{n}_info" if n in ("plugin", "op_selection") else n for n in found} >= METRICS
    calls = {
        (sample.labels["op"], sample.labels["tokens"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "opweave_op_calls"
    }
    assert calls["silu_and_mul", "1"] == layers


# Metrics: the names that dashboards know, and the numbers of the engine


LABELS = {"model_name": "tiny-pydoc"}


def values(server: Running) -> dict[str, float]:
    text = server.get("/metrics").text
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_numbers(start: Start) -> None:
    engine = FakeEngine()
    server = start(engine)
    for _ in range(3):
        server.post("/v1/completions", {"prompt": "Return the", "max_tokens": 5})
    server.post("/v1/completions", {"prompt": 3})
    server.get("/no/such/path/1")
    server.get("/no/such/path/2")
    found = values(server)
    labels = sorted(LABELS.items())
    assert found[f"opweave_generation_tokens_total{labels}"] == 15
    prompt = len(engine.tokenizer.encode("Return the"))
    assert found[f"opweave_prompt_tokens_total{labels}"] == 3 * prompt
    assert found[f"opweave_kv_cache_usage_perc{labels}"] == 0.25
    ended = sorted({**LABELS, "finished_reason": "length"}.items())
    assert found[f"opweave_request_success_total{ended}"] == 3

    def responses(path: str, status: int, method: str = "POST") -> float:
        labels = {"method": method, "path": path, "status": str(status)}
        return found[f"opweave_http_requests_total{sorted(labels.items())}"]

    assert responses("/v1/completions", 200) == 3
    assert responses("/v1/completions", 400) == 1
    assert responses("unknown", 404, "any") == 2


def test_histograms_are_cumulative(start: Start) -> None:
    engine = FakeEngine()
    for value in (0.002, 0.002, 0.3, 5000.0):
        engine._first_token.add(value)
    found = values(start(engine))
    name = "opweave_time_to_first_token_seconds"

    def bucket(bound: str) -> float:
        return found[f"{name}_bucket{sorted({**LABELS, 'le': bound}.items())}"]

    assert [bucket(b) for b in ("0.001", "0.0025", "0.25", "0.5", "2560.0", "+Inf")] == [
        0, 2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert found[f"{name}_count{sorted(LABELS.items())}"] == 4
    assert found[f"{name}_sum{sorted(LABELS.items())}"] == 5000.304


def test_methods_that_nobody_knows_are_one(server: Running) -> None:
    for number in range(5):
        assert server.client.request(f"M{number}", "/health").status_code == 405
    found = server.get("/metrics").text
    assert 'http_requests_total{method="any",path="/health",status="405"} 5.0' in found
    assert "M1" not in found


def test_which_kernels_are_preferred(server: Running) -> None:
    ops = {each["op"]: each["preferred"] for each in server.get("/v1/ops").json()["data"]}
    found = values(server)
    for op, provider in ops.items():
        labels = sorted({"op": op, "provider": provider, "plugin": ""}.items())
        assert found[f"opweave_op_selection_info{labels}"] == 1
