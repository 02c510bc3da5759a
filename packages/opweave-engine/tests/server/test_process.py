"""I/O processors of plugins: requests of their own form, over HTTP and in programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from models.tiny_checkpoints import edit_config, write_checkpoint
from opweave.config import EngineConfig
from opweave.plugins import IO_PROCESSOR_PLUGINS, loader
from opweave.plugins.discovery import PluginPolicy
from opweave.plugins.entry import UnknownPluginError
from opweave.plugins.loader import Loader
from opweave_engine import LLM, Checkpoint, Embedder, InvalidArgumentError, open_engine
from opweave_engine.errors import CheckpointError
from opweave_engine.prompts import IOProcessor, IOProcessors, io_processor
from plugins import helpers
from server.conftest import Running, Start, running
from server.fake_engine import CHECKPOINT, FakeEngine
from server.test_errors import error_of
from server.test_limits import ask
from support.processes import wait_until

PATH = "/v1/process"
SOURCE = '''
from opweave_engine import SamplingParams
from opweave_engine.prompts import IOProcessor

class Outlines(IOProcessor):
    """Writes the beginning of a function for each name."""

    def prompts(self, request):
        if not isinstance(request, dict) or "names" not in request:
            raise ValueError("names is missing")
        return [f"def {name}" for name in request["names"]]

    def sampling_params(self, request):
        return SamplingParams(max_tokens=request.get("length", 4), temperature=0)

    def result(self, request, outputs):
        if request.get("breaks"):
            return object()
        texts = [output.outputs[0].text for output in outputs]
        return {"functions": dict(zip(request["names"], texts)), "seed": self.config.seed}

class Distance(IOProcessor):
    embeds = True

    def prompts(self, request):
        return [request["a"], request["b"]]

    def result(self, request, outputs):
        one, two = (output.embedding for output in outputs)
        return sum((x - y) ** 2 for x, y in zip(one, two)) ** 0.5

def outlines():
    return "processors_module.Outlines"

def distance():
    return "processors_module.Distance"
'''
POINTS = {
    IO_PROCESSOR_PLUGINS: {"outlines": "processors_module:outlines",
                           "distance": "processors_module:distance"},
}  # fmt: skip
NAMES = {"names": ["add", "mul"], "length": 6}


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "site"
    helpers.install(folder, helpers.files("processors", POINTS, SOURCE))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(loader, "_loader", Loader(helpers.points_in(folder), PluginPolicy()))
    yield
    sys.modules.pop("processors_module", None)


def processor(name: str) -> IOProcessor:
    return io_processor(name, EngineConfig(seed=7))


@pytest.fixture
def naming(tmp_path: Path) -> Callable[[object], Path]:
    """Return a function that copies the checkpoint and lets it name a processor."""

    def copy(name: object) -> Path:
        folder = shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
        edit_config(folder, io_processor_plugin=name)
        return folder

    return copy


def test_over_http(start: Start) -> None:
    engine = FakeEngine()
    server = start(engine, io_processor=processor("outlines"))
    answer = server.post(PATH, {"data": NAMES, "model": "tiny-pydoc", "priority": 3})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"], body["id"][:5]) == ("process", "tiny-pydoc", "proc-")
    assert body["data"]["seed"] == 7
    assert list(body["data"]["functions"]) == ["add", "mul"]
    assert all(body["data"]["functions"].values())
    encode = engine.tokenizer.encode
    assert [call.prompt for call in engine.calls] == [encode("def add"), encode("def mul")]
    assert {(call.params.max_tokens, call.priority) for call in engine.calls} == {(6, 3)}


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({}, "data", "required"),
        ({"data": 3}, "data", "names is missing"),
        ({"data": {"names": []}}, "data", "at least one prompt"),
        ({"data": {"names": ["a"], "length": 0}}, "data", "max_tokens=0"),
        ({"data": {"names": ["word " * 400]}}, "data", "context"),
        ({"data": {"names": ["\ud800"]}}, None, "surrogate"),
        ({"data": NAMES, "model": "gpt"}, "model", "does not exist"),
    ],
)
def test_requests_that_it_refuses(
    start: Start, body: dict[str, Any], param: str | None, named: str
) -> None:
    server = start(io_processor=processor("outlines"))
    headers = {"content-type": "application/json"}
    answer = server.post(PATH, content=json.dumps(body), headers=headers)
    error = error_of(answer, 404 if param == "model" else 400)
    assert named in error["message"]
    assert error["param"] == param
    assert not server.engine.running


def test_what_a_processor_does_wrong_is_logged_and_not_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(io_processor=processor("outlines"))
    error_of(server.post(PATH, {"data": {**NAMES, "breaks": True}}), 500)
    assert "Outlines returned a value that is not JSON" in caplog.text
    caplog.clear()
    error_of(server.post(PATH, {"data": {"names": 5}}), 500)
    assert "'int' object is not iterable" in caplog.text


def test_without_a_processor(server: Running) -> None:
    error = error_of(server.post(PATH, {"data": NAMES}), 400)
    assert error["code"] == "no_io_processor"
    assert "--io-processor" in error["message"]


def test_hanging_up_aborts(start: Start) -> None:
    engine = FakeEngine(delay=60)
    server = start(engine, io_processor=processor("outlines"))
    connection = ask(server, PATH, {"data": NAMES})
    wait_until(lambda: len(engine.running) == 2)
    connection.close()
    wait_until(lambda: server.state.admission.active == 0)
    assert len(engine.aborted) == 2


def test_in_a_program(naming: Callable[[object], Path]) -> None:
    llm = LLM(naming("outlines"), dtype="float32", seed=5)
    expected = [
        output.outputs[0].text
        for output in llm.generate(
            ["def add", "def mul"], processor("outlines").sampling_params(NAMES)
        )
    ]
    for name in (None, "outlines"):
        found = llm.process(NAMES, io_processor=name)
        assert list(found["functions"].values()) == expected
        assert found["seed"] == 5
    with pytest.raises(ValueError, match="names is missing"):
        llm.process(3)
    with pytest.raises(UnknownPluginError, match="'outlines'"):
        llm.process(NAMES, io_processor="outline")
    with pytest.raises(InvalidArgumentError, match="Distance is for encoders"):
        llm.process({"a": "x", "b": "y"}, io_processor="distance")


def test_which_processor_a_checkpoint_names(naming: Callable[[object], Path]) -> None:
    named = IOProcessors(Checkpoint(naming("outlines")), EngineConfig())
    assert type(named.find()).__name__ == "Outlines"
    assert named.find() is named.find("outlines")
    assert type(named.find("distance")).__name__ == "Distance"
    none = IOProcessors(Checkpoint(CHECKPOINT), EngineConfig())
    assert none.find() is None
    with pytest.raises(InvalidArgumentError, match="--io-processor NAME"):
        none.get(None, embeds=False)


def test_a_checkpoint_that_names_no_name(naming: Callable[[object], Path]) -> None:
    with pytest.raises(CheckpointError, match="io_processor_plugin=3"):
        IOProcessors(Checkpoint(naming(3)), EngineConfig()).find()


def test_vectors(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    write_checkpoint(folder, "bert")
    data = {"a": [5, 6, 7], "b": [8, 9]}
    embedder = Embedder(folder)
    one, two = (output.embedding for output in embedder.embed([data["a"], data["b"]]))
    expected = sum((x - y) ** 2 for x, y in zip(one, two, strict=True)) ** 0.5
    assert embedder.process(data, io_processor="distance") == pytest.approx(expected, rel=1e-4)
    with pytest.raises(InvalidArgumentError, match="models that generate text"):
        embedder.process(NAMES, io_processor="outlines")
    engine: Any = open_engine(folder)
    with running(engine, template=None, io_processor=processor("distance")) as server:
        answer = server.post(PATH, {"data": data})
        assert answer.json()["data"] == pytest.approx(expected, rel=1e-4)
    engine.shutdown()
