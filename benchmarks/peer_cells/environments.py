"""Environments of the other engines, one each in build/peers, so that their torch may differ."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness import WorkerError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "peers"
_VLLM = ROOT / "packages" / "opweave-vllm"
_STAMP = "installed.txt"
_LONGEST_ERROR = 200  # characters


@dataclass(frozen=True)
class Environment:
    """The packages of an engine.

    Attributes:
        folder: its name in build/peers.
        requirements: arguments of ``uv pip install``.
        variables: environment variables of the installation.
        notice: printed before it, because it takes long.
    """

    folder: str
    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    notice: str = ""

    @property
    def python(self) -> Path:
        return FOLDER / self.folder / "bin" / "python"


# The CUDA builds of torchvision do not import next to the CPU build of torch.
_WITHOUT_CUDA = ("--excludes", str(_VLLM / "excludes.txt"))
ENVIRONMENTS = {
    "llama.cpp": Environment(
        "llama_cpp",
        ("llama-cpp-python==0.3.36", "numpy"),
        # Compiled for this CPU; make's job slots are hidden, because ninja cannot use them.
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "MAKEFLAGS": ""},
        "compiled here: ten minutes or so on two cores",
    ),
    "vLLM": Environment(
        "vllm", ("--requirement", str(_VLLM / "requirements.txt"), *_WITHOUT_CUDA), notice="3.5 GB"
    ),
    "OpenVINO": Environment(
        "openvino", ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", *_WITHOUT_CUDA)
    ),
    "transformers": Environment("transformers", ("torch", "transformers==5.23.0")),
}


def install(peer: str, report: Callable[[str], object]) -> Path:
    """Return a Python that has *peer*, which is installed unless it is already.

    Args:
        peer: a key of ENVIRONMENTS.
        report: called with a line before something is installed.

    Raises:
        WorkerError: it cannot be installed; the message is one line.
    """
    if peer == "llama.cpp" and (python := os.environ.get("LLAMA_CPP_PYTHON")):
        return Path(python)
    environment = ENVIRONMENTS[peer]
    constraints = ROOT / "constraints.txt"
    stamp = FOLDER / environment.folder / _STAMP
    wanted = "\n".join([*environment.requirements, constraints.read_text(encoding="utf-8")])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return environment.python
    notice = f" ({environment.notice})" if environment.notice else ""
    report(f"installing {peer}{notice}")
    uv = _uv()
    _run(sys.executable, "-m", "venv", str(FOLDER / environment.folder))
    _run(
        *(str(uv), "pip", "install", "--quiet", "--python", str(environment.python)),
        *("--constraint", str(constraints), *environment.requirements),
        variables=environment.variables,
    )
    stamp.write_text(wanted, encoding="utf-8")
    return environment.python


def _uv() -> Path:
    """Return uv: pip takes very long to resolve what vLLM requires."""
    uv = FOLDER / "uv" / "bin" / "uv"
    if not uv.is_file():
        _run(sys.executable, "-m", "venv", str(FOLDER / "uv"))
        pip = FOLDER / "uv" / "bin" / "pip"
        _run(str(pip), "--disable-pip-version-check", "--quiet", "install", "uv")
    return uv


def _run(*command: str, variables: Mapping[str, str] | None = None) -> None:
    env = {**os.environ, **(variables or {})}
    if links := os.environ.get("PIP_FIND_LINKS"):
        env.setdefault("UV_FIND_LINKS", links)  # uv uses the wheels that pip finds
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    except OSError as error:
        raise WorkerError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        # uv writes the cause first, and a long log of the build after it.
        why = textwrap.shorten(done.stderr, _LONGEST_ERROR, placeholder=" …")
        raise WorkerError(f"installation failed: {why}")
