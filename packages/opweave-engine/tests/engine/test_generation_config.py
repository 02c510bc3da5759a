"""generation_config.json sets sampling defaults and EOS tokens, in every way to run a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from models.tiny_checkpoints import EOS, VOCABULARY, Checkpoints, random_ids
from opweave.config import EngineConfig
from opweave.ir.errors import SettingError
from opweave_engine import LLM, AsyncEngine, CheckpointError, SamplingParams
from server.conftest import running
from server.fake_engine import FakeEngine

VALUES = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
PROMPT = random_ids(5, 7)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def path(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(checkpoint("llama")[0], tmp_path / "model"))
    (copy / "generation_config.json").unlink(missing_ok=True)
    return copy


def write(folder: Path, **values: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))


def defaults(path: Path, source: str = "auto") -> SamplingParams:
    llm = LLM(path, config=EngineConfig(generation_config=source))
    found = llm.default_sampling_params()
    llm.shutdown()
    return found


def test_every_default(path: Path, tmp_path: Path) -> None:
    assert defaults(path) == SamplingParams()
    write(path, **VALUES, max_new_tokens=7, top_h=None)
    wanted = SamplingParams(**VALUES, max_tokens=7)  # type: ignore[arg-type]
    assert defaults(path) == wanted
    assert defaults(path, "none") == defaults(path, "vllm") == SamplingParams()
    write(tmp_path / "other", temperature=0.25)
    assert defaults(path, str(tmp_path / "other")) == SamplingParams(temperature=0.25)
    # null is not a value.
    write(path, temperature=None, top_k=None)
    assert defaults(path) == SamplingParams()


def test_prompts_without_parameters_get_the_defaults(path: Path) -> None:
    write(path, top_k=1, max_new_tokens=12)
    llm = LLM(path)
    (greedy,) = llm.generate(PROMPT, GREEDY)
    expected = greedy.outputs[0].token_ids
    expected = expected[: expected.index(EOS) + 1] if EOS in expected else expected
    (output,) = llm.generate(PROMPT)
    assert output.outputs[0].token_ids == expected
    *_, output = llm.stream(PROMPT)
    assert output.outputs[0].token_ids == expected
    template = "{{ messages[0].content }}"
    (output,) = llm.chat([{"role": "user", "content": "dog"}], chat_template=template)
    ids = llm.tokenizer.encode("dog", add_special_tokens=False)
    assert output.outputs[0].token_ids == llm.generate(ids)[0].outputs[0].token_ids
    # Parameters are used as they are: sampled, and of another length.
    drawn = {
        tuple(llm.generate(PROMPT, SamplingParams(max_tokens=5, seed=seed))[0].outputs[0].token_ids)
        for seed in range(8)
    }
    assert len(drawn) > 1
    changed = llm.default_sampling_params(max_tokens=3)
    assert changed == SamplingParams(top_k=1, max_tokens=3)


def test_defaults_are_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, **VALUES, top_h=None, num_beams=4, do_sample=True, suppress_tokens=[])
    caplog.set_level("INFO", "opweave_engine")
    defaults(path)
    found = [r.message for r in caplog.records if "generation_config.json" in r.message]
    assert len(found) == 2
    assert "temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05" in found[0]
    assert "--generation-config none" in found[0]
    assert found[1].endswith("not followed: num_beams=4")
    caplog.clear()
    defaults(path, "none")
    write(path, temperature=1.0, top_p=1.0, num_beams=1)  # as without them
    defaults(path)
    assert "generation_config" not in caplog.text


@pytest.mark.parametrize("values", [{"top_p": 2}, {"temperature": "0.6"}, {"max_new_tokens": 0.5}])
def test_wrong_values(values: dict[str, object], path: Path) -> None:
    write(path, **values)
    with pytest.raises(CheckpointError, match=r"generation_config.json has a wrong value: .*none"):
        LLM(path)
    assert defaults(path, "none") == SamplingParams()


def test_wrong_sources(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        defaults(path, "nowhere")
    with pytest.raises(CheckpointError, match=r"has no generation_config.json. Give a directory"):
        defaults(path, str(tmp_path))
    for value in ("", None, 1):
        with pytest.raises(SettingError, match="must be 'auto', 'none' or the name"):
            EngineConfig(generation_config=value)  # type: ignore[arg-type]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Return"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Return"}]},
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_fields_of_a_request_win(endpoint: str) -> None:
    engine = FakeEngine()
    engine.sampling_defaults = {**VALUES, "max_tokens": 7}
    with running(engine) as server:
        for fields in ({}, {"temperature": 0.0, "top_p": 1.0}, {"top_k": 0, "max_tokens": 3}):
            assert server.post(endpoint, {**BODIES[endpoint], **fields}).status_code == 200
            wanted: Any = {**VALUES, "max_tokens": 7, **fields}
            assert engine.calls[-1].params == SamplingParams(**wanted)
        # A default is a limit, which the context may cut.
        engine.sampling_defaults = {"max_tokens": 400}
        assert server.post(endpoint, BODIES[endpoint]).status_code == 200
        asked = server.post(endpoint, {**BODIES[endpoint], "max_tokens": 400})
        assert asked.status_code == 400
        engine.sampling_defaults = {}
        server.post(endpoint, BODIES[endpoint])
        most = 16 if endpoint == "/v1/completions" else None
        assert engine.calls[-1].params == SamplingParams(max_tokens=most)


def test_over_http(path: Path) -> None:
    write(path, top_k=1, max_new_tokens=12)
    llm = LLM(path)
    expected = llm.generate("the quick")[0].outputs[0].text
    for source, is_same in (("auto", True), ("none", False)):
        engine: Any = AsyncEngine(path, config=EngineConfig(generation_config=source))
        with running(engine) as server:
            body = {"prompt": "the quick", "seed": 3, "max_tokens": 12}
            text = server.post("/v1/completions", body).json()["choices"][0]["text"]
            assert (text == expected) is is_same
        engine.shutdown()


@pytest.mark.parametrize("source", ["generation_config.json", "config.json", "tokenizer"])
def test_every_source_of_eos_ends_a_text(source: str, path: Path, tmp_path: Path) -> None:
    """The last token that the model writes greedily is made an EOS token in one source."""
    llm = LLM(path)
    tokens = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    last = next(token for token in tokens[3:] if token > 3)
    count = tokens.index(last) + 1
    unused = next(token for token in range(4, VOCABULARY) if token not in tokens)
    write(path, eos_token_id=last if source == "generation_config.json" else unused)
    config = json.loads((path / "config.json").read_text())
    config["eos_token_id"] = [last if source == "config.json" else unused]
    (path / "config.json").write_text(json.dumps(config))
    text = llm.tokenizer.token(last) if source == "tokenizer" else "</s>"
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": text}))
    (output,) = LLM(path).generate(PROMPT, SamplingParams(max_tokens=12, temperature=0))
    (answer,) = output.outputs
    assert answer.finish_reason == "stop"
    assert answer.token_ids == tokens[:count]
    # Without defaults, the file still names EOS tokens; so does one in another directory.
    config = EngineConfig(generation_config="none")
    assert last in LLM(path, config=config).tokenizer.eos_token_ids
    write(tmp_path / "other", eos_token_id=7)
    other = EngineConfig(generation_config=str(tmp_path / "other"))
    assert 7 in LLM(path, config=other).tokenizer.eos_token_ids
