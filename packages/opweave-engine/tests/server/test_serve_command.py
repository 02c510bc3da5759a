"""``opweave serve``, run as a user runs it: the real engine, options, files and errors."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from opweave.cli import main
from opweave.config import environment
from opweave_engine import LLM, SamplingParams
from opweave_engine.cli.serve import serve_app
from opweave_engine.server import AddressError, listen_unix
from server.command import ROOT, Command
from server.conftest import texts_of
from server.fake_engine import CHECKPOINT
from server.test_schema import PATHS
from support.fixtures import FreshPython
from support.processes import wait_until

START_BUDGET = 5.0  # seconds of processor time; on an idle machine those are seconds
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("serve")
    options = {
        "port": 1, "served-model-name": ["pydoc", "other"], "max_num_seqs": 8,
        "ir-op-priority": {"rms_norm": ["aten", "native"]}, "log-format": "json",
        "dtype": "float32",
    }  # fmt: skip
    (folder / "options.json").write_text(json.dumps(options))
    command = Command(
        folder, str(CHECKPOINT), "--config", str(folder / "options.json"), "--port=0",
        f"--chat-template={TEMPLATE}", OPWEAVE_API_KEY="k1, k2", OMP_NUM_THREADS="1",
        PYTHONDONTWRITEBYTECODE="",  # as on a machine of a user
    )  # fmt: skip
    (folder / "cpu").write_text(str(command.cpu_seconds()))
    yield command
    command.close()


@pytest.fixture(scope="module")
def client(command: Command) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{command.url}/v1", api_key="k2", max_retries=0, http_client=command.client
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CHECKPOINT, dtype="float32", ir_op_priority={"rms_norm": ["aten", "native"]})


def expected(llm: LLM, prompt: str, count: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=count)
    return llm.generate(prompt, params)[0].outputs[0].text


@pytest.mark.timed
def test_it_starts_quickly(command: Command) -> None:
    assert float((command.log.parent / "cpu").read_text()) < START_BUDGET


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_the_library(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    answers: Any = client.completions.create(
        model="pydoc", prompt=["Return the", "If the"], max_tokens=20, temperature=0, stream=stream
    )
    assert texts_of(answers, stream=stream) == [
        expected(llm, prompt, 20) for prompt in ("Return the", "If the")
    ]


def test_chat_with_the_template_that_was_given(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Return the"}]
    chat = client.chat.completions.create(
        model="pydoc", messages=messages, max_tokens=8, temperature=0
    )
    ids = httpx_post(client, "/tokenize", {"messages": messages})["tokens"]
    plain = client.completions.create(model="pydoc", prompt=ids, max_tokens=8, temperature=0)
    assert chat.choices[0].message.content == plain.choices[0].text


def httpx_post(client: openai.OpenAI, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = str(client.base_url).removesuffix("/v1/") + path
    answer = httpx.post(url, json=body, headers={"Authorization": "Bearer k1"}, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_options_from_the_file_and_the_environment(command: Command, client: openai.OpenAI) -> None:
    assert command.client.get("/v1/models").status_code == 401
    assert [model.id for model in client.models.list()] == ["pydoc", "other"]
    headers = {"Authorization": "Bearer k1"}
    ops = command.client.get("/v1/ops", headers=headers).json()["data"]
    assert {each["op"]: each["preferred"] for each in ops}["rms_norm"] == "aten"
    assert command.client.get("/health").json()["status"] == "ok"


def test_the_log(command: Command, client: openai.OpenAI) -> None:
    client.completions.create(
        model="pydoc", prompt="a secret prompt", max_tokens=1,
        extra_headers={"X-Request-Id": "mine"}, extra_body={"odd": 1},
    )  # fmt: skip
    wait_until(lambda: '"mine"' in command.log.read_text().rpartition("\n")[0])  # after the answer
    lines = [json.loads(line) for line in command.log.read_text().splitlines()]
    (access,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (access["method"], access["path"]) == ("POST", "/v1/completions")
    assert (access["status"], access["ignored_fields"]) == (200, ["odd"])
    assert access["seconds"] > 0
    options = [line["message"] for line in lines if line["logger"] == "opweave_engine.cli.serve"]
    assert "option --port: 0 (command line)" in options
    assert any(text.startswith("option --max-num-seqs: 8 (/") for text in options)
    assert "secret" not in command.log.read_text()
    assert "k1" not in command.log.read_text()


def test_it_ends_well(tmp_path: Path) -> None:
    socket_file = tmp_path / "opweave.sock"
    command = Command(
        tmp_path, "--model", str(CHECKPOINT), f"--uds={socket_file}", "--log-prompts",
        "--max-model-len=40", "--api-key=secret", "--enforce-eager", "--cpu-threads=2",
    )  # fmt: skip
    assert (command.name, command.url) == ("tiny-pydoc", f"unix:{socket_file}")
    with pytest.raises(AddressError, match="in use"):
        listen_unix(str(socket_file))
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "Return the", "max_tokens": 50}
    answer = command.client.post("/v1/completions", json=body, headers=headers)
    assert "40 tokens" in answer.json()["error"]["message"]
    command.client.post("/v1/completions", json={"prompt": "Return the"}, headers=headers)
    events = command.stop_while_it_streams(
        lambda: command.process.send_signal(signal.SIGTERM), **headers
    )
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"
    assert command.close() == 0
    assert not socket_file.exists()
    log = command.log.read_text()
    assert "option --api-key: *** (command line)" in log
    assert "option --cpu-threads: 2 (command line)" in log
    assert "CPU threads per rank: 2 (--cpu-threads)" in log
    assert "secret" not in log
    assert "prompts ['Return the']" in log
    assert "Traceback" not in log


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def in_this_process(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["serve", *map(str, arguments)])
        captured = capsys.readouterr()
        assert exit_.value.code == 2, captured.err
        assert captured.out == ""
        assert captured.err.startswith("opweave: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return in_this_process


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "MODEL"),
        (("no/such/model",), "no/such/model"),
        ((CHECKPOINT, "--prt=1"), "--port"),
        ((CHECKPOINT, "--port=http"), "http"),
        ((CHECKPOINT, "--port=99999"), "99999"),
        ((CHECKPOINT, "--port=80.5"), "80.5"),
        ((CHECKPOINT, "--host=192.0.2.1"), "192.0.2.1"),
        ((CHECKPOINT, "--log-level=LOUD"), "LOUD"),
        ((CHECKPOINT, "--dtype=float12"), "float12"),
        ((CHECKPOINT, "--max-requests=0"), "max_requests"),
        ((CHECKPOINT, "--max-num-seqs=0"), "max_num_seqs"),
        ((CHECKPOINT, "--max-model-len=9999"), "9999"),
        ((CHECKPOINT, "--data-parallel-size=0"), "data_parallel_size=0"),
        ((CHECKPOINT, "--data-parallel-address=ray://x:1"), "host:port"),
        ((CHECKPOINT, "--scheduling-policy=best"), "fcfs"),
        ((CHECKPOINT, "--chat-template=no.jinja"), "no.jinja"),
        ((CHECKPOINT, "--chat-template={% if"), "not valid Jinja"),
        ((CHECKPOINT, "--ir-op-priority.rmsnorm=native"), "rms_norm"),
        ((CHECKPOINT, "--compilation-config.mode=9"), "mode"),
        ((CHECKPOINT, "--plugin.acme.x=1"), "acme.x"),
        ((CHECKPOINT, "--cpu-threads=0"), "cpu_threads"),
        ((CHECKPOINT, "--io-processor=nobody"), "nobody"),
    ],
)
def test_bad_options_end_in_one_line(run: Any, arguments: tuple[Any, ...], named: str) -> None:
    rest = () if any("--port" in str(each) for each in arguments) else ("--port=0",)
    quiet = ("--log-level=ERROR",) if "--log-level=LOUD" not in arguments else ()
    assert named in run(*arguments, *rest, *quiet)


def test_a_port_that_is_taken(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = run(CHECKPOINT, f"--port={port}", "--log-level=ERROR")
    assert f"port {port}" in error
    assert "in use" in error
    assert "--port 0" in error


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_package_that_is_missing(run: Any, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = run(CHECKPOINT, "--port=0", "--log-level=ERROR")
    assert repr(package) in error
    assert "pip install opweave-engine" in error


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.yaml", "prt: 3", "Did you mean 'port'"),
        ("a.yaml", "port: [3", "malformed"),
        ("a.yaml", "- port", "by name"),
        ("a.yaml", "port: http", "http"),
        ("a.json", "{", "malformed"),
        ("a.toml", "port = ", "malformed"),
        ("a.ini", "port = 1", ".yaml, .yml, .json or .toml"),
    ],
)
def test_files_of_options_that_are_wrong(
    run: Any, tmp_path: Path, name: str, text: str, named: str
) -> None:
    (tmp_path / name).write_text(text)
    error = run(CHECKPOINT, "--config", tmp_path / name, "--log-level=ERROR")
    assert named in error
    if "http" not in text:
        assert name in error
    assert "no.yaml" in run(CHECKPOINT, "--config", "no.yaml", "--log-level=ERROR")


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
@pytest.mark.parametrize("text", ["", "# port: 80\n"])
def test_files_without_options(run: Any, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    wrong = ("--max-num-seqs=0", "--log-level=ERROR")
    assert "max_num_seqs=0" in run(CHECKPOINT, "--config", tmp_path / name, *wrong)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "max_num_seqs: 0\nprefix-caching: false"),
        ("a.toml", "max-num-seqs = 0\nenforce-eager = true"),
        ("a.json", '{"max_num_seqs": 0, "api-key": ["a", "b"]}'),
    ],
)
def test_files_of_options_are_read(run: Any, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    file = ("--config", tmp_path / name)
    assert "max_num_seqs=0" in run(CHECKPOINT, *file, "--log-level=ERROR")
    stronger = run(CHECKPOINT, *file, "--max-num-seqs=-3", "--log-level=ERROR")
    assert "max_num_seqs=-3" in stronger


def test_keys_of_the_environment() -> None:
    given = {"OPWEAVE_API_KEY": "a, b,", "OPWEAVE_ISA": "base"}
    assert environment.api_keys(given) == ["a", "b"]
    assert environment.in_use(given) == {"OPWEAVE_API_KEY": "***", "OPWEAVE_ISA": "base"}


def test_every_option_is_in_the_guide() -> None:
    page = (ROOT / "docs" / "reference" / "serve-options.md").read_text()
    options = {
        name
        for argument in serve_app.assemble_argument_collection()
        for name in argument.names
        if name.startswith("--")
    }
    assert len(options) > 25
    documented = set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE))
    assert documented == {
        name for name in options if "_" not in name and not name.startswith("--no-")
    }


def test_every_endpoint_is_in_the_guide() -> None:
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    cells = re.findall(r"^\| (`(?:GET|POST) /.*?) \|", page, re.MULTILINE)
    documented = set(re.findall(r"`(?:\w+ )?(/[^`]*)`", " ".join(cells)))
    assert documented == PATHS


@pytest.mark.slow
def test_threads_share_one_arena(fresh_python: FreshPython) -> None:
    code = """
    import ctypes, os, tempfile, threading
    from concurrent.futures import ThreadPoolExecutor
    from opweave_engine.cli.serve import limit_arenas

    def arenas():
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        with tempfile.TemporaryFile() as file:
            stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
            libc.malloc_info(0, stream)
            libc.fclose(stream)
            file.seek(0)
            return file.read().count(b"<heap nr=")

    def allocate_together(count):
        barrier = threading.Barrier(count)
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: (bytearray(5000), barrier.wait()), range(count)))
        return arenas()

    limit_arenas()
    print(arenas(), allocate_together(7))
    """
    before, after = fresh_python(code, warm=False).stdout.split()
    assert before == after
