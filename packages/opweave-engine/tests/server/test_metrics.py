"""Metrics: the names that dashboards know, and the numbers of the engine."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from server.conftest import Running, Start
from server.fake_engine import FakeEngine

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
