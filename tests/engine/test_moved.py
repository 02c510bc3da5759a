"""Old module paths of the engine that the documentation named."""

from __future__ import annotations

import importlib
import sys

import pytest

from opweave.plugins import resolve_obj_by_qualname

MOVED = {
    "opweave_engine.communicators.SharedMemoryCommunicator": "parallel.communicators",
    "opweave_engine.executor.RankedExecutor": "parallel.executor",
    "opweave_engine.executor.in_process.InProcessExecutor": "parallel.executor",
    "opweave_engine.io_processor.IOProcessor": "request.io_processor",
    "opweave_engine.model_runner.ModelRunner": "runner.model_runner",
    "opweave_engine.sampler.Sampler": "sampling.sampler",
    "opweave_engine.stat_logger.StatLogger": "metrics.stat_logger",
    "opweave_engine.worker.Worker": "runner.worker",
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_same_object_and_warns(
    old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = old.rpartition(".")
    for known in [known for known in sys.modules if known.startswith(module)]:
        monkeypatch.delitem(sys.modules, known)
    with pytest.warns(DeprecationWarning, match=r"has moved to opweave_engine\."):
        found = resolve_obj_by_qualname(old)
    assert found is getattr(importlib.import_module(f"opweave_engine.{MOVED[old]}"), name)


def test_the_scheduler_keeps_its_path() -> None:
    from opweave_engine.scheduler import Scheduler

    assert resolve_obj_by_qualname("opweave_engine.scheduler.Scheduler") is Scheduler


def test_an_unknown_module_is_still_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"opweave_engine\.nothing"):
        importlib.import_module("opweave_engine.nothing")
