"""One rank: a worker and its communicator, which executes the calls of the first rank."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self

import torch
from torch.distributed.distributed_c10d import Store

from opweave import ir, platforms
from opweave.config import EngineConfig
from opweave.ir.errors import OpweaveError, described
from opweave.ir.selection import policy_for
from opweave.layers import tensor_parallel
from opweave.platforms import Platform
from opweave.plugins import (
    GENERAL_PLUGINS,
    State,
    load_general_plugins,
    plugin_report,
)
from opweave_engine.cache_plan import CachePlan
from opweave_engine.errors import NonFiniteLogitsError, RankFailedError
from opweave_engine.forward import SequenceStep
from opweave_engine.load.checkpoint import Progress
from opweave_engine.parallel.communicators import Communicator, RankGroup
from opweave_engine.parts import part
from opweave_engine.runner import ModelFacts, Worker
from opweave_engine.sampling.sampler import Sampled

# Messages between the first rank and the others, after their agreement.


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
        method: a method of :class:`RankWorker`.
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


# The settings that all processes of an engine must agree on before they compute.


_PARENT = "the first process"


@dataclass(frozen=True)
class Agreement:
    """The settings of the process that starts the others; sent as JSON, for other versions.

    Attributes:
        protocol: the version of the messages between processes.
        platform: the result of :meth:`opweave.platforms.Resolution.to_json`, with versions.
        plugins: the active general plugins, with distribution and version.
        priorities: the providers of each op, in the order in which they are tried.
        required: the traits that an implementation must have.
    """

    protocol: int
    platform: str
    plugins: list[str]
    priorities: dict[str, list[str]]
    required: list[str]

    @classmethod
    def here(cls) -> Self:
        """Return the settings of this process and of the calling scope."""
        load_general_plugins()
        ir.current_registry().ensure_ready()
        platform = platforms.resolution().to_json()
        return cls(PROTOCOL, platform, _plugins(), _priorities(), _required())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of :meth:`to_json`.

        Raises:
            RankFailedError: the first process uses another version of the protocol.
        """
        data = json.loads(text)
        if data.get("protocol") != PROTOCOL:
            raise RankFailedError(
                f"{_PARENT} speaks version {data.get('protocol')} of the protocol between "
                f"processes; this process speaks {PROTOCOL}. Install the same opweave for all."
            )
        return cls(**data)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def impose(self) -> Platform:
        """Apply the settings to this process; return the platform.

        Raises:
            PlatformMismatchError: this process already uses another platform, or other versions.
            RankFailedError: this process has other plugins.
        """
        platform = platforms.impose(self.platform).platform
        load_general_plugins()
        if (found := _plugins()) != self.plugins:
            raise RankFailedError(
                f"{_PARENT} uses the general plugins {_listed(self.plugins)}; this process "
                f"finds {_listed(found)}. Both must use one environment."
            )
        return platform

    @contextmanager
    def selection(self) -> Iterator[None]:
        """Select ops as in the first process, inside the block.

        Raises:
            IrError: an op or a provider is unknown in this process.
            RankFailedError: an op would still use other providers.
        """
        with ir.priority(self._differences()), ir.require(*self.required):
            self._check_priorities()
            yield

    def settle(self) -> None:
        """Select ops as in the first process, in this whole process from now on.

        Raises:
            IrError, RankFailedError: as :meth:`selection`.
        """
        lists, settings = self._differences(), ir.current_registry().settings
        settings.set_priorities(ir.Source.COMMAND_LINE, lists, _PARENT)
        settings.require(ir.Source.COMMAND_LINE, self.required, _PARENT)
        ir.current_registry().check_settings()
        self._check_priorities()

    def _differences(self) -> dict[str, list[str]]:
        ir.current_registry().ensure_ready()
        own = _priorities()
        return {op: names for op, names in self.priorities.items() if own.get(op) != names}

    def _check_priorities(self) -> None:
        for op, names in _priorities().items():
            if names != self.priorities.get(op):
                raise RankFailedError(
                    f"{_PARENT} tries {_listed(self.priorities.get(op, []))} for op "
                    f"{op!r}; this process tries {_listed(names)}. Both must use one environment."
                )


def _plugins() -> list[str]:
    return sorted(
        f"{record.name} ({record.distribution} {record.version})"
        for record in plugin_report()
        if record.group == GENERAL_PLUGINS and record.state is State.LOADED
    )


def _priorities() -> dict[str, list[str]]:
    ops = ir.current_registry().ops
    return {name: op.get_priority() for name, op in sorted(ops.items())}


def _required() -> list[str]:
    ops = ir.current_registry().ops.values()
    return sorted({trait for op in ops for trait in policy_for(op).required})


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


# One rank: a worker, and its communicator.


class RankWorker:
    """The worker of a rank, in the engine's process or in another one.

    Args:
        start: its identity and configuration.
        platform: names the worker and the communicator.
        store: the rendezvous store.

    Attributes:
        worker: the worker of this rank.
        communicator: collectives with the other ranks; None before :meth:`join`.
    """

    def __init__(self, start: Start, platform: Platform, store: Store) -> None:
        self._start, self._platform, self._store = start, platform, store
        self.communicator: Communicator | None = None
        worker: type[Worker] = part(platform, "get_worker_cls", start.config)
        self.worker = worker(start.model, start.config, platform, start.local_rank)
        self._threads = torch.get_num_threads()
        if start.threads is not None:
            torch.set_num_threads(start.threads)

    def join(self) -> None:
        """Initialize the device, and connect to the other ranks."""
        self.worker.init_device()
        kind: type[Communicator] = part(self._platform, "get_device_communicator_cls")
        self.communicator = kind(
            RankGroup(
                self._start.rank,
                self._start.size,
                self.worker.device,
                self._platform.dist_backend,
                self._store,
                self._start.timeout,
            )
        )

    def load_model(self, progress: Progress | None = None) -> None:
        """Load this rank's part of the model."""
        assert self.communicator is not None, "join() comes first"
        with tensor_parallel(self.communicator.tensor_parallel()):
            self.worker.load_model(progress)

    def facts(self) -> ModelFacts:
        """Return the facts about the model that the engine needs."""
        return self.worker.facts()

    def allocate(self, plan: CachePlan) -> None:
        """Make the cache."""
        self.worker.allocate(plan)

    def warm_up(self) -> None:
        """Compile, and select every op."""
        self.worker.warm_up()

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step."""
        return self.worker.execute(steps)

    def follow(self, steps: Sequence[SequenceStep]) -> None:
        """Compute one step with the other ranks, without returning the tokens."""
        with suppress(NonFiniteLogitsError):  # all ranks find them, and the first one tells
            self.worker.execute(steps)

    def abort(self) -> None:
        """Make a waiting collective raise; called from another thread."""
        if self.communicator is not None:
            self.communicator.abort()

    def close(self) -> None:
        """Leave the group."""
        if self.communicator is not None:
            self.communicator.close()
        torch.set_num_threads(self._threads)


# A rank that executes the calls of the first rank.


_log = logging.getLogger(__name__)

AGREED = b"agreed"
_GRACE = 5.0  # seconds to finish after the first rank has gone


def follow(connection: Connection, open_store: Callable[[], Store]) -> int:
    """Execute the first rank's calls until it stops; return the exit code of the process.

    If the first rank goes away, the process ends, even in the middle of a step. Ctrl-C and SIGTERM,
    which a terminal or a service sends to all processes, are left to the first rank.

    Args:
        connection: to the first rank.
        open_store: opens the rendezvous store; may wait long if the first rank has gone.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    try:
        agreement = Agreement.from_json(connection.recv_bytes().decode())
        platform = agreement.impose()
        with agreement.selection():
            connection.send_bytes(AGREED)
            return _serve(connection, platform, open_store)
    except (EOFError, ConnectionError):  # the first rank has gone
        return 1
    except Exception as error:  # the first rank must be told of any error
        return _refuse(connection, error)


def _refuse(connection: Connection, error: Exception) -> int:
    try:
        connection.send_bytes(described(error).encode())
    except OSError:  # it has gone
        _log.exception("a rank failed, and the first rank has gone")
    return 1


def _serve(connection: Connection, platform: Platform, open_store: Callable[[], Store]) -> int:
    inbox: SimpleQueue[Call | Stop] = SimpleQueue()
    start = connection.recv()
    assert isinstance(start, Start), start
    finished = threading.Event()
    threading.Thread(target=_read, args=(connection, inbox, finished), daemon=True).start()
    rank = None
    try:
        rank = RankWorker(start, platform, open_store())
        while isinstance(call := inbox.get(), Call):
            connection.send(Reply(call.number, _do(rank, call)))
        return 0
    except Exception as error:
        trace = None if isinstance(error, OpweaveError) else traceback.format_exc()
        connection.send(Failure(described(error), trace))
        return 1
    finally:
        if rank is not None:
            rank.close()
        finished.set()


def _do(rank: RankWorker, call: Call) -> object:
    method = rank.follow if call.method == "execute" else getattr(rank, call.method)
    value: object = method(*call.arguments)
    return value


def _read(
    connection: Connection, inbox: SimpleQueue[Call | Stop], finished: threading.Event
) -> None:
    """Pass on messages; exit the process when the connection ends."""
    try:
        while True:
            message = connection.recv()
            inbox.put(message)
    except (EOFError, OSError, pickle.UnpicklingError):
        inbox.put(Stop())
        if not finished.wait(_GRACE):
            os._exit(1)
