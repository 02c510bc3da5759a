"""Checkpoints that the tests of the engine read, each written once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from models.tiny_checkpoints import Checkpoints, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a function that gives the directory of a kind, and transformers' model in it."""

    @cache
    def get(kind: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp(kind)
        return path, write_checkpoint(path, kind)

    return get
