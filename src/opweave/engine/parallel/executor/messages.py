"""What the first rank and the others tell each other, once they know that they agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opweave.config import EngineConfig

# Changes with anything in this file, and with the methods below.
PROTOCOL = 1
Method = Literal["join", "load_model", "facts", "allocate", "warm_up", "execute"]


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank is.

    Attributes:
        rank: its place, from 0.
        size: how many ranks there are.
        local_rank: the index of its device on its machine.
        model: the directory of a checkpoint.
        config: of the engine, fitted to the platform.
        timeout: seconds to wait for another rank.
        threads: that its kernels use; None: as the environment says.
    """

    rank: int
    size: int
    local_rank: int
    model: Path
    config: EngineConfig
    timeout: float
    threads: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """Do this now; calls are done in their order.

    Attributes:
        number: of the call.
        method: of :class:`opweave.engine.parallel.executor.rank.RankWorker`.
        arguments: for it.
    """

    number: int
    method: Method
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A call is done.

    Attributes:
        number: of the call.
        value: what it returned; None for a step, whose tokens all ranks find alike.
    """

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A call failed, and the rank stops.

    Attributes:
        error: the name of the exception's type, and its message.
        trace: the traceback, for the log; None where the message says all.
    """

    error: str
    trace: str | None


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine shuts down."""
