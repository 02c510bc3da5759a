"""HTTP features: compressed bodies, and HEAD."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib

import pytest

from opweave_engine.server import ServerConfig
from server.conftest import Running, Start
from server.test_limits import until

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "Return the", "max_tokens": 3}).encode()
COMPRESSED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    "GZIP": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "identity": BODY,
}
LIMIT = 1 << 20


def post(server: Running, content: bytes, encoding: str) -> object:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return server.post(PATH, content=content, headers=headers)


@pytest.mark.parametrize(("encoding", "content"), COMPRESSED.items(), ids=COMPRESSED)
def test_compressed_bodies(server: Running, encoding: str, content: bytes) -> None:
    plain = server.post(PATH, content=BODY, headers={"content-type": "application/json"}).json()
    found = post(server, content, encoding).json()
    assert found["choices"] == plain["choices"]


def test_a_gzip_body_of_several_parts(server: Running) -> None:
    parts = gzip.compress(BODY[:9]) + gzip.compress(b"") + gzip.compress(BODY[9:])
    assert post(server, parts, "gzip").status_code == 200
    answer = post(server, parts + gzip.compress(b"") * 99, "gzip")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_content_encoding")


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(BODY)[:-9], BODY],
    # Compressed data holds the time, and every worker must give a test the same name.
    ids=["not compressed", "cut short", "plain"],
)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_damaged_bodies(server: Running, content: bytes, encoding: str) -> None:
    answer = post(server, content, encoding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_content_encoding")
    assert encoding in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "nonsense"])
def test_unknown_encodings(server: Running, encoding: str) -> None:
    answer = post(server, BODY, encoding)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert repr(encoding) in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_small_body_that_becomes_large_is_refused_early(start: Start, encoding: str) -> None:
    server = start(config=ServerConfig(max_body_bytes=LIMIT))
    content = b"0" * (50 * LIMIT)
    bomb = gzip.compress(content) if encoding == "gzip" else zlib.compress(content)
    assert len(bomb) < LIMIT
    del content
    tracemalloc.start()
    answer = post(server, bomb, encoding)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 413
    assert most < 8 * LIMIT


GETS = ["/v1/models", "/v1/models/tiny-pydoc", "/metrics", "/health", "/ping", "/version",
        "/v1/ops", "/v1/plugins", "/openapi.json"]  # fmt: skip


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_a_body(server: Running, path: str) -> None:
    whole, head = server.get(path), server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert server.get(path).status_code == 200  # on the same connection


def test_head_of_what_get_does_not_find(server: Running) -> None:
    for path, status in [("/v1/nothing", 404), (PATH, 405), ("/v1/models/nothing", 404)]:
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (status, b"")
    assert server.client.head(PATH).headers["allow"] == "POST"


def test_head_is_counted_under_its_path(server: Running) -> None:
    server.client.head("/version")
    lines = server.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("opweave_http_requests_total")]
    assert any('"HEAD"' in line and '"/version"' in line for line in counted), counted


@pytest.mark.parametrize(("trusted", "client"), [(None, "203.0.113.7"), ("192.0.2.1", "127.0.0.1")])
def test_the_client_of_a_proxy_is_logged(
    trusted: str | None,
    client: str,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if trusted is None:
        monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    else:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    with caplog.at_level("INFO", "opweave_engine.server.access"):
        start().get("/health", headers={"X-Forwarded-For": "203.0.113.7"})
        until(lambda: "path='/health'" in caplog.text)
    assert f"client='{client}'" in caplog.text
