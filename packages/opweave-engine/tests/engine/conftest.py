"""Checkpoints that several tests read, written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import layer_checkpoints, tiny_checkpoints

Built = tuple[Path, Any]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Return a function that gives the directory of a kind, and transformers' model in it.

    Models that are made of layers get a tokenizer, too.
    """
    built: dict[str, Built] = {}

    def get(kind: str) -> Built:
        if kind not in built:
            path = tmp_path_factory.mktemp(kind)
            of_layers = kind in layer_checkpoints.KINDS
            write = (layer_checkpoints if of_layers else tiny_checkpoints).write_checkpoint
            built[kind] = path, write(path, kind)
            if of_layers:
                tiny_checkpoints.write_tokenizer(path)
        return built[kind]

    return get
