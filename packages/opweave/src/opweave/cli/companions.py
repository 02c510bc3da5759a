"""Packages that extend the command line: their commands, and how they run a model.

``opweave-engine`` and ``opweave-vllm`` add commands through the entry-point group
``opweave.commands``. The engine also runs checkpoints for ``explain``, ``record`` and ``tune``,
through ``opweave.model_runner``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Protocol, cast

import torch
from cyclopts import App, Parameter

from opweave.cli.output import CliError

COMMANDS = {
    "generate": "opweave-engine",
    "chat": "opweave-engine",
    "serve": "opweave-engine",
    "quantize": "opweave-engine",
    "bench.serve": "opweave-engine",
    "migrate": "opweave-vllm",
}
"""Commands of packages that may be missing, with the package to install."""

Progress = Callable[[int, int], None]
"""Called with the number of finished steps and of all steps."""


class CheckpointRunner(Protocol):
    """Runs the model of a checkpoint: a directory, or a GGUF file."""

    def tokens(self, model: Path, prompt: str) -> list[int]:
        """Return the token ids of *prompt*, encoded by the model's tokenizer."""

    def module(
        self, model: Path, prompt: str, *, dtype: str, progress: Progress
    ) -> tuple[torch.nn.Module, list[int], torch.dtype]:
        """Load the model as a module of ``(ids, positions)``.

        Return the module, the token ids of *prompt*, and the dtype of the weights.
        """

    def generator(
        self,
        model: Path,
        *,
        dtype: str,
        load_format: str = "auto",
        max_length: int | None = None,
        progress: Progress,
    ) -> Callable[[str | list[int], int, Progress | None], object]:
        """Load the model for greedy generation.

        Args:
            model: the checkpoint.
            dtype: of weights and activations; ``"auto"`` is the checkpoint's.
            load_format: ``"dummy"`` for random weights.
            max_length: tokens of the longest sequence, if memory is to be allocated for one such
                sequence only.
            progress: called while the model loads.

        Returns:
            A function of a prompt (text or token ids), the number of tokens to generate, and a
            progress callback or None.
        """


def model_runner(command: str) -> CheckpointRunner:
    """Return the model runner of the installed engine.

    Raises:
        CliError: the engine is not installed.
    """
    for entry in entry_points(group="opweave.model_runner"):
        return cast("CheckpointRunner", entry.load())
    raise CliError(
        f"opweave {command} runs a model, which needs the package opweave-engine. Install it with: "
        "pip install opweave-engine"
    )


def add_commands(app: App, group: str = "") -> None:
    """Add the commands of *group* to *app*: those of installed packages, and hints for the others.

    Commands are imported when they run.
    """
    references = {entry.name: entry.value for entry in entry_points(group="opweave.commands")}
    for name in sorted({*references, *COMMANDS}):
        parent, _, command = name.rpartition(".")
        if parent != group:
            continue
        if name in references:
            app.command(references[name], name=command)
        else:
            app.command(_missing(name, command))


def _missing(name: str, command: str) -> App:
    app = App(name=command, show=False, help_flags=(), version_flags=())

    def fail(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        raise CliError(
            f"opweave {name.replace('.', ' ')} needs the package {COMMANDS[name]}. "
            f"Install it with: pip install {COMMANDS[name]}"
        )

    app.default(fail)
    return app


def option_hint(command: str, option: str) -> str | None:
    """Return a hint about an unknown option from the package of *command*, if it has one."""
    for entry in entry_points(group="opweave.option_hints", name=command):
        hint: Callable[[str], str | None] = entry.load()
        return hint(option)
    return None
