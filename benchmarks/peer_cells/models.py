"""The models: written once with random weights from a fixed seed, and converted for each engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig

from engine_cells.llama_cpp_file import write_gguf, write_random_blocks
from engine_cells.models import LOW_BIT, MIXED, their_checkpoint, write_checkpoint, write_config
from harness import WorkerError, last_error
from peer_cells.environments import FOLDER

_EXPORT = Path(__file__).with_name("workers") / "openvino_export.py"
SMALL, LARGE = "small", "1b"
# The tiny model of both has heads of 64, the smallest that every engine supports.
CONFIGS = {
    (SMALL, "tiny"): LOW_BIT["tiny"],
    (LARGE, "tiny"): LOW_BIT["tiny"],
    (SMALL, "full"): MIXED["full"],
    (LARGE, "full"): LOW_BIT["full"],
}
NAMES = {
    (SMALL, "tiny"): "a Llama of 2 layers",
    (LARGE, "tiny"): "a Llama of 2 layers",
    (SMALL, "full"): "a Llama of 29 M parameters",
    (LARGE, "full"): "Llama-3.2-1B's shape",
}
_DTYPES = {SMALL: torch.float32, LARGE: torch.bfloat16}


class Models:
    """The models of a size, written when they are first requested.

    Args:
        size: ``"tiny"`` or ``"full"``.
        report: called with a line before something is written.
        folder: where to.
    """

    def __init__(
        self, size: str, report: Callable[[str], object], folder: Path = FOLDER / "models"
    ) -> None:
        self.size, self._report, self._folder = size, report, folder
        transformers.utils.logging.disable_progress_bar()

    def vocabulary(self, model: str) -> int:
        return int(CONFIGS[model, self.size]["vocab_size"])

    def checkpoint(self, model: str) -> Path:
        """Return a safetensors checkpoint: float32 of the small model, else bfloat16."""
        config, dtype = CONFIGS[model, self.size], _DTYPES[model]
        return self._once(f"{model}", lambda path: write_checkpoint(path, config, dtype))

    def gguf(self, model: str) -> Path:
        """Return the checkpoint of the small model as a GGUF file in float32."""
        source = self.checkpoint(model)
        return self._once(f"{model}.gguf", lambda path: write_gguf(path, their_checkpoint(source)))

    def blocks(self, model: str, format: str) -> Path:
        """Return a GGUF file with random quantized weights."""
        config = AutoConfig.from_pretrained(self.configuration(model))

        def write(path: Path) -> None:
            torch.manual_seed(0)
            write_random_blocks(path, config, format)

        return self._once(f"{model}-{format}.gguf", write)

    def configuration(self, model: str) -> Path:
        """Return a folder that has only ``config.json``."""
        config = CONFIGS[model, self.size]
        return self._once(f"{model}-config", lambda path: write_config(path, config))

    def openvino(self, model: str, python: Path) -> Path:
        """Return the checkpoint as converted by *python*, which has optimum-intel.

        Raises:
            WorkerError: it cannot be converted.
        """
        source = self.checkpoint(model)

        def export(path: Path) -> None:
            done = subprocess.run(
                [str(python), str(_EXPORT), str(source), str(path)],
                check=False,
                capture_output=True,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
            if done.returncode:
                raise WorkerError(f"conversion failed: {last_error(done.stderr)}")

        return self._once(f"{model}-openvino", export)

    def _once(self, name: str, write: Callable[[Path], object]) -> Path:
        path = self._folder / f"{self.size}-{name}"
        if not path.exists():
            self._report(f"writing {path}")
            partial = path.with_name(f"partial-{path.name}")
            if partial.is_dir():  # of an interrupted run
                shutil.rmtree(partial)
            partial.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            partial.rename(path)
        return path
