"""Jobs, and the stages in which they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
Row = dict[str, Any]
"""A measurement of a job; ``problem`` says what is wrong with it, if anything."""


@dataclass(frozen=True)
class Stage:
    """Jobs of one kind, which run before those of the next stage.

    Attributes:
        name: the first part of the names of its jobs.
        share: the part of the budget after which later stages get their turn first.
        repeats_first: run jobs again whose sources have changed before later stages run at all.
            Otherwise jobs that have never run come first.
    """

    name: str
    share: float = 1.0
    repeats_first: bool = False


@dataclass(frozen=True)
class Job:
    """One unit of work, which runs in a subprocess.

    Attributes:
        name: stable from run to run: the key of the recorded state.
        stage: the name of its stage.
        body: ``"module:function"``, a generator function that yields a :data:`Row` at a time.
        arguments: of the function.
        limit: seconds after which it is killed, not counting its wait for the device.
        expected: seconds that it usually takes; with less left of the budget, it is not started.
        sources: the files that its result depends on, or a function that returns them.
        is_fresh: whether it needs a process that has run no other job.
    """

    name: str
    stage: str
    body: str
    limit: float
    expected: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Path, ...] | Callable[[], tuple[Path, ...]] = ()
    is_fresh: bool = True
