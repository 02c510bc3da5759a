"""The engine's benchmark compares with llama.cpp on the same weights, where there is one.

``LLAMA_CPP_PYTHON`` names a Python that has it, as for the benchmark: benchmarks/engine.py says how
to make one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoConfig

from engine.compared_logits import close, logits, theirs
from opweave.config import EngineConfig
from opweave_engine import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # at the end: its engine.py is not the tests' engine

from engine_cells.llama_cpp_contender import check_python, running  # noqa: E402
from engine_cells.llama_cpp_file import write_gguf, write_random_blocks  # noqa: E402
from engine_cells.models import (  # noqa: E402
    LOW_BIT,
    MIXED,
    SINGLE,
    greedy,
    their_model,
    write_config,
)
from harness import WorkerError  # noqa: E402

PYTHON = os.environ.get("LLAMA_CPP_PYTHON") or sys.executable
needs_llama_cpp = pytest.mark.skipif(
    not os.environ.get("LLAMA_CPP_PYTHON"), reason="LLAMA_CPP_PYTHON names no Python with llama.cpp"
)
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {"plain": MIXED["tiny"], "tied, scaled rope": {**SINGLE["tiny"], "rope_scaling": SCALED}}


def model_of(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return their_model(write_config(folder / "model", config), dtype)


# The file


@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_holds_the_model(tmp_path: Path, name: str) -> None:
    """The matrices bit for bit; opweave's logits tell the order of the rows and the sizes."""
    model = model_of(tmp_path, CONFIGS[name], torch.bfloat16)
    path = write_gguf(tmp_path / "model.gguf", model)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert ("output.weight" in tensors) == (name == "plain")  # the other one is tied
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"BF16", "F32"}
    assert all(t.tensor_type.name == "F32" for n, t in tensors.items() if "norm" in n)
    value = torch.from_numpy(np.array(tensors["blk.1.attn_v.weight"].data)).view(torch.bfloat16)
    assert torch.equal(value, model.model.layers[1].self_attn.v_proj.weight)
    assert close(logits(path), theirs(model.float()))


# llama.cpp


@needs_llama_cpp
@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    model = model_of(tmp_path, CONFIGS[name], torch.float32)
    path = write_gguf(tmp_path / "model.gguf", model)
    draw = torch.Generator().manual_seed(1)
    with running(PYTHON, path, threads=1, context=256, cache="f32") as process:
        for length in (1, 17, 100):
            prompt = torch.randint(model.config.vocab_size, (1, length), generator=draw)
            with torch.inference_mode():
                mask = torch.ones_like(prompt)
                ids = model.generate(prompt, attention_mask=mask, generation_config=greedy(40))
            answer = process.answer(prompt[0].tolist(), 40)
            assert answer.tokens == ids[0, length:].tolist()
            assert len(answer.seconds) == 40
            assert min(answer.seconds) > 0


@needs_llama_cpp
def test_llama_cpp_that_stops_says_why(tmp_path: Path) -> None:
    model = model_of(tmp_path, CONFIGS["plain"], torch.float32)
    path = write_gguf(tmp_path / "model.gguf", model)
    with (
        running(PYTHON, path, threads=1, context=256) as process,
        pytest.raises(WorkerError, match=r"status 1: .*llama_decode of 1 tokens gave"),
    ):
        process.answer([model.config.vocab_size], 1)


def rows_of(part: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a part of the benchmark by name."""
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--size=tiny", "--rounds=1",
            "--steps=3", f"--parts={part}", "--json", "--llama-cpp", PYTHON,
        ],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


@needs_llama_cpp
def test_the_benchmark_has_rows_for_it() -> None:
    rows = rows_of("single")
    for name in ("engine.decode_bandwidth", "engine.prefill"):
        row = rows[f"{name}.llama_cpp"]
        assert row["value"] == rows[name]["value"]
        assert row["against"] == "llama.cpp, bfloat16"
        assert row["ratio"] == pytest.approx(row["value"] / row["baseline"], rel=1e-2)
        assert "llama-cpp-python" in row["case"]


@needs_llama_cpp
def test_the_benchmark_of_low_bit_weights_has_rows_for_it() -> None:
    rows = rows_of("low-bit")
    for weights, file in (("w4a16", "q4_0"), ("q4_0", "q4_0"), ("q4_k", "q4_k")):
        for what in ("decode", "prefill"):
            row = rows[f"engine.low_bit.{what}.{weights}.llama_cpp"]
            assert row["value"] == rows[f"engine.low_bit.{what}.{weights}"]["value"]
            assert row["against"] == f"llama.cpp, {file}"
            assert row["ratio"] == pytest.approx(row["value"] / row["baseline"], rel=1e-2)


@needs_llama_cpp
@pytest.mark.parametrize("format", ["q4_0", "q4_k"])
def test_llama_cpp_answers_as_opweave_does_from_a_file_of_blocks(
    tmp_path: Path, format: str
) -> None:
    """Both choose tokens whose logits are nearly the largest: llama.cpp rounds activations."""
    config = AutoConfig.from_pretrained(write_config(tmp_path / "model", LOW_BIT["tiny"]))
    file = write_random_blocks(tmp_path / "model.gguf", config, format)
    engine = LLM(file, config=EngineConfig(dtype="float32"))
    prompt = torch.randint(config.vocab_size, (20,)).tolist()
    with running(PYTHON, file, threads=1, context=256, cache="f32") as process:
        token = process.answer(prompt, 1).tokens[0]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
    found = engine.generate([prompt], params)[0].outputs[0]
    assert token in found.logprobs[0]


# The file of blocks


def test_a_file_of_blocks_has_the_formats_of_quantized_models(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_config(tmp_path / "model", LOW_BIT["tiny"]))
    file = write_random_blocks(tmp_path / "model.gguf", config, "q4_k")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert kinds.pop("token_embd.weight") == "Q6_K"
    assert {kind for name, kind in kinds.items() if "norm" in name or "rope" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "attn_q" in name} == {"Q4_K"}
    engine = LLM(file, config=EngineConfig(dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert len(engine.generate([[3, 1, 2]], params)[0].outputs[0].token_ids) == 3


# Without it


@pytest.mark.parametrize(
    ("python", "named"),
    [("no/such/python", "No such file"), (sys.executable, "No module named 'llama_cpp'")],
)
def test_a_python_without_it_is_an_error(python: str, named: str) -> None:
    with pytest.raises(WorkerError, match=named):
        check_python(python)
