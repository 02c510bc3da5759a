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
    """Return a function that gives the directory of a kind, and transformers' model in it."""
    return _once(tmp_path_factory, tiny_checkpoints.write_checkpoint)


@pytest.fixture(scope="session")
def layer_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """The same for the models that are made of layers."""
    return _once(tmp_path_factory, layer_checkpoints.write_checkpoint)


def _once(
    folders: pytest.TempPathFactory, write: Callable[[Path, str], Any]
) -> Callable[[str], Built]:
    built: dict[str, Built] = {}

    def get(kind: str) -> Built:
        if kind not in built:
            path = folders.mktemp(kind)
            built[kind] = path, write(path, kind)
        return built[kind]

    return get
