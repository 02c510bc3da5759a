"""Checkpoints that several tests read, written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.tiny_checkpoints import write_checkpoint

Built = tuple[Path, Any]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Return a function that gives the directory of a kind, and transformers' model in it."""
    built: dict[str, Built] = {}

    def get(kind: str) -> Built:
        if kind not in built:
            path = tmp_path_factory.mktemp(kind)
            built[kind] = path, write_checkpoint(path, kind)
        return built[kind]

    return get
