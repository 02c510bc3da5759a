"""Messages between the first rank and the others, after their agreement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opweave.config import EngineConfig

# Increase it with any change of this file or of the methods below.
PROTOCOL = 1
Method = Literal["join", "load_model", "facts", "allocate", "warm_up", "execute"]


@dataclass(frozen=True, slots=True)
class Start:
    """The identity and the configuration of a rank.

    Attributes:
        rank: its index, from 0.
        size: the number of ranks.
        local_rank: the index of its device on its machine.
        model: the directory of a checkpoint.
        config: the engine's configuration, after the platform's changes.
        timeout: seconds to wait for another rank.
        threads: the number of CPU threads for kernels; None: as the environment says.
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
    """A method call; calls run in order.

    Attributes:
        number: the number of the call.
        method: a method of :class:`opweave_engine.parallel.executor.rank.RankWorker`.
        arguments: its arguments.
    """

    number: int
    method: Method
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call.

    Attributes:
        number: the number of the call.
        value: the returned value; None for a step, because all ranks sample the same tokens.
    """

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A call failed, and the rank stops.

    Attributes:
        error: the name of the exception's type, and its message.
        trace: the traceback, for the log; None if the message is enough.
    """

    error: str
    trace: str | None


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine shuts down."""
