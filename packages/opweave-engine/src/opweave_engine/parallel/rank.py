"""One rank: how processes become ranks, agree, and execute the calls of the first rank."""

import ipaddress
import json
import logging
import os
import pickle
import secrets
import signal
import socket
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self, cast

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from opweave import ir, platforms
from opweave.config import EngineConfig
from opweave.ir.errors import OpweaveError, described
from opweave.ir.selection import policy_for
from opweave.layers import tensor_parallel
from opweave.platforms import Platform
from opweave.plugins import GENERAL_PLUGINS, State, load_general_plugins, plugin_report
from opweave_engine.errors import InvalidArgumentError, NonFiniteLogitsError, RankFailedError
from opweave_engine.load.checkpoint import Progress
from opweave_engine.parallel.communicators import Communicator, RankGroup
from opweave_engine.parts import part
from opweave_engine.runner import Worker

# Ranks started by ``torchrun``, which all run the same command.


_ADDRESS = "address"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The environment variables that ``torchrun`` sets for a process.

    Attributes:
        rank: the index of the process.
        size: the number of processes.
        local_rank: the index of the process on its machine.
        local_size: the number of processes on its machine.
        address: the machine of rank 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Read the variables; return None if several processes were not launched.

        Raises:
            InvalidArgumentError: a variable is missing or is not a number.
        """
        if not environment.get("WORLD_SIZE") or environment["WORLD_SIZE"] == "1":
            return None
        try:
            rank, size, local_rank, local_size, address, _ = (environment[n] for n in _NAMES)
            return cls(int(rank), int(size), int(local_rank), int(local_size), address)
        except (KeyError, ValueError) as error:
            raise InvalidArgumentError(
                f"WORLD_SIZE={environment['WORLD_SIZE']} says that several processes were "
                f"launched, but one of {', '.join(_NAMES)} is missing or is not a number: {error}. "
                "Launch with torchrun, which sets them, or unset WORLD_SIZE."
            ) from error

    def check_size(self, tensor_parallel_size: int) -> None:
        """Raise InvalidArgumentError unless all processes are ranks of the engine."""
        if tensor_parallel_size != self.size:
            raise InvalidArgumentError(
                f"{self.size} processes were launched (WORLD_SIZE), but tensor_parallel_size is "
                f"{tensor_parallel_size}. Make both the same: torchrun --nproc-per-node N, or "
                f"--nnodes M --nproc-per-node N with M x N = {tensor_parallel_size}."
            )

    def store(self, timeout: float, backend: str) -> Store:
        """Return the rendezvous store; wait for all processes.

        Args:
            timeout: in seconds.
            backend: the backend of ``torch.distributed``.

        Raises:
            InvalidArgumentError: as :meth:`check_addresses` raises it.
        """
        met = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        store = PrefixStore("opweave", cast("tuple[Any, ...]", met)[0])
        self.check_addresses(store, timeout, backend)
        return store

    def check_addresses(self, store: Store, timeout: float, backend: str) -> None:
        """Check that ranks on different machines can connect to each other.

        All ranks raise the same error, so none waits for a rank that has given up.

        Raises:
            InvalidArgumentError: a rank would advertise a loopback address to other machines.
            RankFailedError: a rank does not come within *timeout* seconds.
        """
        keys = [f"host/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps([_network(), self._loopback(backend)]))
        self._wait(store, keys, timeout)
        networks, problems = zip(*(json.loads(store.get(key)) for key in keys), strict=True)
        if len(set(networks)) > 1 and any(problems):
            rank, problem = next(item for item in enumerate(problems) if item[1])
            raise InvalidArgumentError(f"other machines cannot reach rank {rank}: {problem}")

    def _loopback(self, backend: str) -> str:
        """Return why other machines could not reach this rank, or an empty string."""
        if self.rank == 0 and _is_loopback(address := socket.gethostbyname(self.address)):
            return (
                f"MASTER_ADDR={self.address!r} is the loopback address {address} on its machine. "
                "Pass torchrun an address of its network: --master-addr 10.0.0.1."
            )
        if "gloo" not in backend or os.environ.get("GLOO_SOCKET_IFNAME"):
            return ""
        if _is_loopback(address := _gloo_address()):
            return (
                f"its host name {socket.gethostname()!r} resolves to the loopback address "
                f"{address}. Set GLOO_SOCKET_IFNAME on that machine to its network interface, such "
                "as eth0, or correct its /etc/hosts."
            )
        return ""

    def _wait(self, store: Store, keys: list[str], timeout: float) -> None:
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RankFailedError(
                f"not all of {self.size} ranks came within {timeout:g} s: {error}"
            ) from error

    def accept(self, store: Store, timeout: float) -> dict[int, Connection]:
        """Return connections to the other ranks, for rank 0.

        Raises:
            RankFailedError: a rank does not connect within *timeout* seconds.
        """
        key, others = secrets.token_bytes(32), range(1, self.size)
        with Listener((self.address, 0), backlog=self.size, authkey=key) as listener:
            host, port = cast("tuple[str, int]", listener.address)
            store.set(_ADDRESS, json.dumps([host, port, key.hex()]))
            self._wait(store, [f"coming/{rank}" for rank in others], timeout)
            connections: dict[int, Connection] = {}
            for _ in others:
                connection = listener.accept()
                connections[int(connection.recv_bytes())] = connection
        return connections

    def connect(self, store: Store) -> Connection:
        """Return a connection to rank 0, for the other ranks.

        Raises:
            RankFailedError: it does not answer.
        """
        try:
            host, port, key = json.loads(store.get(_ADDRESS))
            store.set(f"coming/{self.rank}", "")
            connection = Client((host, port), authkey=bytes.fromhex(key))
            connection.send_bytes(str(self.rank).encode())
        except (RuntimeError, OSError, EOFError, AuthenticationError) as error:
            raise RankFailedError(f"rank {self.rank} cannot reach rank 0: {error}") from error
        return connection


def launch_of(tensor_parallel_size: int) -> Launch | None:
    """Return the launch by ``torchrun``, or None if the engine must start its ranks itself.

    Raises:
        InvalidArgumentError: the number of launched processes differs.
    """
    launch = Launch.from_environment() if tensor_parallel_size > 1 else None
    if launch is not None:
        launch.check_size(tensor_parallel_size)
    return launch


def _network() -> str:
    """Return a name of this process's network; loopback addresses do not leave it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not on Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def _gloo_address() -> str:
    """Return the address that gloo advertises without ``GLOO_SOCKET_IFNAME``.

    It is the first address of the host name to which a socket can be bound, else loopback; see
    ``createDefaultDevice`` in torch's ProcessGroupGloo.cpp.
    """
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except socket.gaierror:  # the host name has no address
        entries = []
    for family, kind, protocol, _, address in entries:
        with socket.socket(family, kind, protocol) as probe, suppress(OSError):
            probe.bind(address)
            return str(address[0])
    return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


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
        method: a method of :class:`RankWorker` or of its worker.
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
        if (plugins := _plugins()) != self.plugins:
            raise RankFailedError(
                f"{_PARENT} uses the general plugins {_listed(self.plugins)}; this process "
                f"finds {_listed(plugins)}. Both must use one environment."
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
        local = _priorities()
        return {op: names for op, names in self.priorities.items() if local.get(op) != names}

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
    return {name: op.get_priority() for name, op in sorted(ir.current_registry().ops.items())}


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
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        worker: the worker of this rank.
        communicator: collectives with the other ranks; None before :meth:`join`.
    """

    def __init__(
        self, start: Start, platform: Platform, store: Store, progress: Progress | None = None
    ) -> None:
        self._start, self._platform, self._store = start, platform, store
        self._progress = progress
        self.communicator: Communicator | None = None
        worker: type[Worker] = part(platform, "get_worker_cls", start.config)
        self.worker = worker(start.model, start.config, platform, start.local_rank)
        self._threads = torch.get_num_threads()
        if start.threads is not None:
            torch.set_num_threads(start.threads)

    def do(self, method: Method, *arguments: Any) -> Any:
        """Call a method of this class or of the worker."""
        target = self if method in ("join", "load_model", "warm_up") else self.worker
        return getattr(target, method)(*arguments)

    def join(self) -> None:
        """Initialize the device, and connect to the other ranks."""
        self.worker.init_device()
        start, device, backend = self._start, self.worker.device, self._platform.dist_backend
        group = RankGroup(start.rank, start.size, device, backend, self._store, start.timeout)
        kind: type[Communicator] = part(self._platform, "get_device_communicator_cls")
        self.communicator = kind(group)

    def load_model(self) -> None:
        """Load this rank's part of the model."""
        assert self.communicator is not None, "join() comes first"
        with tensor_parallel(self.communicator.tensor_parallel()):
            self.worker.load_model(self._progress)

    def warm_up(self) -> None:
        """Warm up the worker, which may record the collectives in graphs."""
        assert self.communicator is not None, "join() comes first"
        with tensor_parallel(self.communicator.tensor_parallel()):
            self.worker.warm_up()

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
_EXIT_SECONDS = 5.0  # for this process to finish after the first rank has gone


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
    except Exception as error:  # the first rank must receive any error
        try:
            connection.send_bytes(described(error).encode())
        except OSError:
            _log.exception("a rank failed, and the first rank has gone")
        return 1


def _serve(connection: Connection, platform: Platform, open_store: Callable[[], Store]) -> int:
    inbox: SimpleQueue[Call | None] = SimpleQueue()
    start = connection.recv()
    assert isinstance(start, Start), start
    done = threading.Event()
    threading.Thread(target=_read, args=(connection, inbox, done), daemon=True).start()
    rank = None
    try:
        rank = RankWorker(start, platform, open_store())
        while (call := inbox.get()) is not None:
            value = None
            with suppress(NonFiniteLogitsError):  # all ranks find them; the first one raises
                value = rank.do(call.method, *call.arguments)
            # All ranks sample the same tokens, so the first rank does not need these.
            connection.send(Reply(call.number, None if call.method == "execute" else value))
        return 0
    except Exception as error:
        trace = None if isinstance(error, OpweaveError) else traceback.format_exc()
        connection.send(Failure(described(error), trace))
        return 1
    finally:
        if rank is not None:
            rank.close()
        done.set()


def _read(connection: Connection, inbox: SimpleQueue[Call | None], done: threading.Event) -> None:
    """Pass on messages; exit the process when the connection ends."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError, pickle.UnpicklingError):
        inbox.put(None)
        if not done.wait(_EXIT_SECONDS):
            os._exit(1)
