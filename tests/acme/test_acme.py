"""``examples/acme-device``: installed, opweave runs on it; uninstalled, nothing of it is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import EXAMPLE, ROOT, Run

OWNER = {"plugin": "acme", "distribution": "acme-device", "version": "0.1.0"}
# The driver is built first, which takes minutes where other work shares the processor.
pytestmark = pytest.mark.timeout(900)
EXPECTED = {
    ("op", "acme_tiled_linear"),
    ("implementation", "acme_tiled_linear:acme"),
    ("implementation", "paged_attention:acme"),
    ("replacement of", "RMSNorm"),
    ("replacement of", "RowParallelLinear"),
    ("compiler pass", "acme_device.passes:scale_residuals"),
    ("plugin option", "acme.tiled_weights"),
    ("environment variable", "ACME_MEMORY_GIB"),
    ("HTTP router", "acme"),
}
# In float32: a small model's scores in bfloat16 tie so often that any two sets of kernels differ.
GENERATE = (
    "generate",
    ROOT / "examples" / "models" / "tiny-pydoc",
    "--prompt=Return a list of",
    "--prompt=Raises an exception",
    "--max-tokens=24",
    "--dtype=float32",
    "--json",
)


def tokens(done: Any) -> list[list[int]]:
    return [output["token_ids"] for output in json.loads(done.stdout)["outputs"]]


def providers(done: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in json.loads(done.stdout)["selections"]:
        found.setdefault(row["op"], set()).add(row["chosen"])
    return found


@pytest.fixture(scope="module")
def host_tokens() -> list[list[int]]:
    """Return the tokens generated on the CPU, in this process, without the device."""
    from opweave_engine import LLM, SamplingParams

    llm = LLM(GENERATE[1], dtype="float32")
    prompts = [str(a).removeprefix("--prompt=") for a in GENERATE if "--prompt=" in str(a)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_the_vendors_own_tests_pass(python: Run, site: Path) -> None:
    arguments = ("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "tests")
    done = python(*arguments, site=site, cwd=EXAMPLE)
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_vendors_slow_tests_pass(python: Run, site: Path) -> None:
    python(
        "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", "tests",
        site=site, cwd=EXAMPLE,
    )  # fmt: skip


def test_generates_what_the_cpu_generates(
    opweave: Run, site: Path, host_tokens: list[list[int]]
) -> None:
    done = opweave(*GENERATE, site=site)
    assert tokens(done) == host_tokens
    ran = providers(done)
    assert ran == {op: {"acme"} for op in ran}
    assert {"acme_tiled_linear", "paged_attention", "fused_add_rms_norm"} <= ran.keys()


@pytest.mark.slow
def test_generates_the_same_compiled(
    opweave: Run, site: Path, host_tokens: list[list[int]]
) -> None:
    done = opweave(*GENERATE, "--compilation-config.mode=OPWEAVE_COMPILE", site=site)
    assert tokens(done) == host_tokens


def test_uninstalled_it_is_gone(opweave: Run, host_tokens: list[list[int]]) -> None:
    done = opweave(*GENERATE)
    assert tokens(done) == host_tokens
    assert "acme" not in done.stdout


@pytest.mark.slow
def test_left_out_it_is_gone_too(opweave: Run, site: Path, host_tokens: list[list[int]]) -> None:
    done = opweave(*GENERATE, site=site, env={"OPWEAVE_PLUGINS": "-acme"})
    assert tokens(done) == host_tokens
    assert "acme" not in done.stdout


@pytest.mark.slow
def test_its_knobs_work(opweave: Run, site: Path, host_tokens: list[list[int]]) -> None:
    untiled = opweave(*GENERATE, "--plugin.acme.tiled-weights=false", site=site)
    assert tokens(untiled) == host_tokens
    assert "acme_tiled_linear" not in providers(untiled)
    native = opweave(*GENERATE, "--ir-op-priority.acme_tiled_linear=native", site=site)
    assert tokens(native) == host_tokens
    assert providers(native)["acme_tiled_linear"] == {"native"}


@pytest.mark.slow
def test_too_little_memory_is_one_line(opweave: Run, site: Path) -> None:
    done = opweave(*GENERATE, site=site, check=False, env={"ACME_MEMORY_GIB": "0.001"})
    assert done.returncode != 0
    assert "acme:0 is out of memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_lists_everything_with_its_owner(opweave: Run, site: Path) -> None:
    report = json.loads(opweave("doctor", "--json", site=site).stdout)
    assert report["platform"]["name"] == "acme"
    assert report["problems"] == []
    parts = (
        "worker",
        "model_runner",
        "scheduler",
        "sampler",
        "attn_backend",
        "device_communicator",
    )
    assert {f"get_{part}_cls" for part in parts} <= set(report["platform"]["overrides"])
    found = {(each["kind"], each["name"]): each["owner"] for each in report["overrides"]}
    assert found.keys() >= EXPECTED
    assert all(owner == OWNER for owner in found.values())
    assert report["platform"]["owner"] == OWNER


@pytest.mark.slow
def test_conforms_as_a_platform(python: Run, site: Path) -> None:
    done = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--pyargs", "opweave.conformance.platform", "--platform", "acme",
        site=site,
    )  # fmt: skip
    assert " passed" in done.stdout
