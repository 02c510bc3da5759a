"""Random requests after the OpenAPI schema: no status of 500 and up, and nothing undocumented."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from opweave.config import EngineConfig
from opweave_engine.prompts import IOProcessor
from opweave_engine.server import create_app
from server.conftest import TEMPLATE
from server.fake_engine import FakeEngine

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
EXAMPLES = 12
WITH_BODY = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/process",
    "/v1/rerank", "/v1/score", "/rerank", "/score", "/tokenize", "/detokenize",
}  # fmt: skip
PATHS = WITH_BODY | {
    "/v1/models", "/v1/models/{model}", "/health", "/ping", "/version", "/metrics", "/v1/ops",
    "/v1/plugins",
}  # fmt: skip


class Echo(IOProcessor):
    """Takes every request, and returns it."""

    def prompts(self, request: Any) -> list[str]:
        return ["x"]

    def result(self, request: Any, outputs: Sequence[Any]) -> Any:
        return request


@cache
def operations() -> dict[str, Any]:
    app = create_app(FakeEngine(embeds=True), None, TEMPLATE, Echo(EngineConfig()))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    return {each.ok().path: each.ok() for each in schema.get_all_operations()}


def test_the_schema_has_every_endpoint() -> None:
    assert set(operations()) == PATHS


TWICE = {"/rerank", "/score", "/ping"}  # other paths of the same routes


@pytest.mark.parametrize("path", sorted(PATHS - TWICE))
def test_requests_after_the_schema(path: str) -> None:
    check(path, GenerationMode.POSITIVE)


@pytest.mark.parametrize("path", sorted(WITH_BODY - TWICE))
def test_requests_that_break_the_schema(path: str) -> None:
    check(path, GenerationMode.NEGATIVE)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
    ],
)
def test_streams_after_the_schema(path: str, asked: dict[str, Any]) -> None:
    body = {**asked, "stream": True}
    case = operations()[path].Case(body=body, media_type="application/json")
    response = case.call_and_validate(checks=CHECKS)
    assert response.headers["content-type"][0].startswith("text/event-stream")


def check(path: str, mode: GenerationMode) -> None:
    operation = operations()[path]

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def send(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.call_and_validate(checks=CHECKS)

    send()
