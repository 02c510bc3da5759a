"""``opweave serve`` on ``acme:0``: every part of acme's runs, and the tokens are the CPU's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from opweave_engine import LLM, SamplingParams

from .conftest import COMMAND, ROOT, environment

CHECKPOINT = ROOT / "examples" / "models" / "tiny-pydoc"
LAYERS = 6
COUNT = 12  # tokens of each answer
PROMPTS = ["Return a list of words that are there, and " * 8, "Return a list of", "Raises"]
# The driver is built first, which takes minutes where other work shares the processor.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    """The tokens that the CPU generates, in this process: no device is there."""
    params = SamplingParams(max_tokens=COUNT, temperature=0, logprobs=0, ignore_eos=True)
    answers = [
        output.outputs[0] for output in LLM(CHECKPOINT, dtype="float32").generate(PROMPTS, params)
    ]
    return [
        [at[token].decoded_token for token, at in zip(one.token_ids, one.logprobs, strict=True)]
        for one in answers
    ]


@contextmanager
def serving(site: Path, folder: Path, *options: str, **variables: str) -> Iterator[httpx.Client]:
    """Serve in a process of its own, with so small a budget that prompts are computed in parts."""
    arguments = (
        str(CHECKPOINT), "--port=0", "--dtype=float32", "--max-num-seqs=4",
        "--max-num-batched-tokens=40", *options,
    )  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", *arguments],
            stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder,
            env=environment(site, OMP_NUM_THREADS="1", **variables),
        )  # fmt: skip
        try:
            found = re.search(r" on (http://\S+)", process.stdout.readline())
            assert found, (folder / "log").read_text()
            with httpx.Client(base_url=found[1], timeout=100, trust_env=False) as client:
                yield client
        finally:
            process.terminate()
            process.communicate(timeout=100)
    assert process.returncode == 0, (folder / "log").read_text()


def completed(client: httpx.Client) -> list[list[str]]:
    body = {
        "prompt": PROMPTS, "max_tokens": COUNT, "temperature": 0, "logprobs": 0,
        "ignore_eos": True,
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return [choice["logprobs"]["tokens"] for choice in answer["choices"]]


def check_parts(device: dict[str, Any]) -> None:
    """Check that each part has done its share of the three answers."""
    assert device["device"] == "acme:0"
    forwards = device["decode_forwards"], device["prompt_forwards"]
    assert min(forwards) > 0
    assert device["aligned_parts"] > 0
    assert device["attention_calls"] == LAYERS * (sum(forwards) + 1)  # the warm-up is one
    assert device["sampled_tokens"] == COUNT * len(PROMPTS)
    assert device["busy_seconds"] > 0
    assert device["peak_bytes"] > 0
    assert device["ran_on_host"].keys() == {"aten::index.Tensor_out"}


def test_serves_through_all_of_its_parts(
    site: Path, tmp_path: Path, expected: list[list[str]]
) -> None:
    with serving(site, tmp_path) as client:
        assert completed(client) == expected
        device = client.get("/acme/device").json()
        check_parts(device)
        assert device["collectives"] == 0
        plugins = client.get("/v1/plugins").json()["data"]
        metrics = client.get("/metrics").text
    states = {each["group"].partition(".")[2]: each["state"] for each in plugins}
    assert states == {
        "platform_plugins": "active", "general_plugins": "loaded", "stat_logger_plugins": "loaded",
    }  # fmt: skip
    assert "HTTP router acme" in {what for each in plugins for what in each["registered"]}
    selected = re.findall(r'opweave_op_selection_info{op="paged_attention",(.*?)}', metrics)
    assert selected == ['plugin="acme",provider="acme"']
    log = (tmp_path / "log").read_text()
    assert "acme:0: the first forward ran on the host: nothing" in log
    assert re.search(r"the device was busy for [\d.]+ of [\d.]+ s", log)


@pytest.mark.slow
def test_serves_from_two_devices(site: Path, tmp_path: Path, expected: list[list[str]]) -> None:
    with serving(site, tmp_path, "--tensor-parallel-size=2", ACME_DEVICES="2") as client:
        assert completed(client) == expected
        device = client.get("/acme/device").json()
    # Two for each layer, one for the embeddings, and one for the scores of those that ask.
    forwards = device["decode_forwards"] + device["prompt_forwards"] + 1
    assert forwards * (2 * LAYERS + 1) < device["collectives"] <= forwards * (2 * LAYERS + 2)
