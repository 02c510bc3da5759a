"""Where ``opweave serve`` listens, and what it says of the options of other servers."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from opweave.cli import main
from opweave.cli.app import app
from opweave.platforms import Platform
from opweave_engine.cli.serve import _check_utilization, replacements, serve_app
from opweave_engine.sampling.params import MAX_LOGPROBS
from opweave_engine.server import (
    AddressError,
    ServerConfig,
    ServerConfigError,
    create_app,
    listen,
    listen_unix,
)
from opweave_engine.server.app import request_fields
from opweave_engine.server.connection import check_certificate
from server.conftest import running
from server.fake_engine import CHECKPOINT, FakeEngine
from support import ROOT

HOW_TO = ROOT / "docs" / "how-to"
BODY = {"prompt": "Return the", "max_tokens": 3, "temperature": 0}
REPLACEMENTS = replacements()


def test_clients_may_come_before_the_server_runs() -> None:
    with listen("127.0.0.1", 0) as bound, socket.create_connection(bound.getsockname(), 60):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "999.1.1.1", "", "no such host", "a" * 64 + ".b"])
def test_hosts_that_are_wrong(host: str) -> None:
    with pytest.raises(AddressError) as found:
        listen(host, 0)
    message = str(found.value)
    assert repr(host) in message
    assert "--host" in message
    assert "--port" not in message
    assert "Errno" not in message


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl")
    key, file = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-keyout", key, "-out", file, "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, file


def test_the_socket_of_a_server_that_died_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "opweave.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with listen_unix(str(path)) as bound:
        assert bound.getsockname() == str(path)
    other = tmp_path / "a file"
    other.write_text("kept")
    for wrong in (other, tmp_path / "nowhere" / "x.sock", tmp_path / ("long" * 60)):
        with pytest.raises(AddressError, match="--uds"):
            listen_unix(str(wrong))
    assert other.read_text() == "kept"


def test_https(certificate: tuple[Path, Path]) -> None:
    key, file = map(str, certificate)
    context = ssl.create_default_context(cafile=file)
    with (
        running(config=ServerConfig(ssl_keyfile=key, ssl_certfile=file)) as server,
        httpx.Client(base_url=server.url, verify=context, timeout=60, trust_env=False) as client,
    ):
        assert server.url.startswith("https://")
        for stream in (False, True):
            answer = client.post("/v1/completions", json={**BODY, "stream": stream})
            assert answer.status_code == 200, answer.text


def test_certificates_that_cannot_be_used(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    key, file = certificate
    broken = tmp_path / "broken.pem"
    broken.write_text("nonsense")
    check_certificate(ServerConfig(ssl_certfile=str(file), ssl_keyfile=str(key)))
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + file.read_text())
    check_certificate(ServerConfig(ssl_certfile=str(both)))
    for certfile, keyfile in [
        (broken, key),
        (file, broken),
        (tmp_path / "none", key),
        (file, None),
    ]:
        config = ServerConfig(
            ssl_certfile=str(certfile), ssl_keyfile=None if keyfile is None else str(keyfile)
        )
        with pytest.raises(ServerConfigError, match="Cannot use the certificate"):
            check_certificate(config)
    with pytest.raises(ServerConfigError, match="needs ssl_certfile"):
        ServerConfig(ssl_keyfile=str(key))


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["serve", *arguments])
        assert exit_.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return run


def test_the_model_is_given_once(error: Any) -> None:
    assert "Give a checkpoint directory" in error()
    assert "given twice" in error("one", "--model", "two")
    assert "not both" in error(str(CHECKPOINT), "--uds=x", "--port=1")
    assert "nowhere" in error("--model", "nowhere")


@pytest.mark.parametrize("option", REPLACEMENTS)
def test_options_of_vllm_have_a_replacement(error: Any, option: str) -> None:
    shown = error("model", option, "1")
    assert f"Unknown option: {option}. {REPLACEMENTS[option]}" in shown


@pytest.mark.parametrize("option", ["--swap_space=4", "--swap-space=4"])
def test_other_spellings_of_an_option(error: Any, option: str) -> None:
    assert REPLACEMENTS["--swap-space"] in error("model", option)


def test_replacements_exist_and_are_needed() -> None:
    own = {name for argument in serve_app.assemble_argument_collection() for name in argument.names}
    for option, hint in REPLACEMENTS.items():
        assert option not in own
        for name in re.findall(r"--[a-z.-]*[a-z]", hint):
            assert name in own | {"--compilation-config.mode"}, hint


def test_replacements_name_routes_fields_and_parts_that_exist() -> None:
    routes = set(create_app(FakeEngine(), ServerConfig()).openapi()["paths"]) | {"/docs"}
    platform_parts = {name for name in dir(Platform) if name.endswith("_cls")}
    for option, hint in REPLACEMENTS.items():
        assert set(re.findall(r"(?<!\w)/[a-z0-9/]+", hint)) <= routes, hint
        for command in re.findall(r"[Rr]un opweave (\w+)", hint):
            assert command in set(app), hint
        for field in re.findall(r"the field (\w+)", hint):
            for endpoint in ("/v1/completions", "/v1/chat/completions"):
                assert request_fields()[endpoint][field].status == "supported", hint
        for part in re.findall(r"platform plugin names the (\w+)", hint):
            assert f"get_{part}_cls" in platform_parts, hint
        if limit := re.search(r"up to (\d+)", hint):
            assert (option, int(limit[1])) == ("--max-logprobs", MAX_LOGPROBS)


def test_replacements_deny_only_features_without_a_page() -> None:
    pages = [page.stem for page in HOW_TO.glob("*.md")]
    denied = {re.split(r"\W", hint)[0] for hint in REPLACEMENTS.values() if "not supported" in hint}
    assert denied
    for feature in denied:
        stem = feature.lower()[:8]
        assert not [page for page in pages if stem in page], f"{feature} has a page"


def test_a_share_of_memory_that_means_nothing_here_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _check_utilization()
    assert "--gpu-memory-utilization has no effect" in caplog.text


def test_a_share_of_memory_reaches_the_engine(error: Any) -> None:
    assert "memory_utilization=1.5" in error(str(CHECKPOINT), "--gpu-memory-utilization=1.5")
