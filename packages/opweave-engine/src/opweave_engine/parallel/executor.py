"""Executors: start the workers of an engine, and call them."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self, cast

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from opweave.config import EngineConfig
from opweave.platforms import Platform
from opweave_engine.cache_plan import CachePlan
from opweave_engine.errors import EngineDeadError, InvalidArgumentError, RankFailedError
from opweave_engine.forward import SequenceStep
from opweave_engine.load.checkpoint import Progress
from opweave_engine.parts import part
from opweave_engine.runner import ModelFacts, Worker, cpu_threads
from opweave_engine.sampling.sampler import Sampled

# The interface of executors.


class Executor(ABC):
    """Runs the workers of one engine. The constructor loads the model on each worker.

    Args:
        model: the directory of a checkpoint.
        config: the engine's configuration.
        platform: names the worker.
        progress: called while loading, with the number of tensors loaded so far and in total.

    Attributes:
        facts: facts about the model; the memory is the minimum over all workers.

    Raises:
        EngineError, ModelError: the checkpoint is missing, damaged or not supported.
    """

    facts: ModelFacts

    @abstractmethod
    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None = None,
    ) -> None: ...

    @abstractmethod
    def allocate(self, plan: CachePlan) -> None:
        """Allocate the caches of all workers, and warm the workers up."""

    @abstractmethod
    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        """Compute one step on all workers, and return the token of each sequence that samples."""

    def check(self) -> None:  # noqa: B027 - a worker in this process fails in a call
        """Raise the error of a worker that died between calls.

        Raises:
            RankFailedError: a worker died.
        """

    def watch(self, call: Callable[[], None]) -> None:  # noqa: B027 - as above
        """Call *call*, in another thread, when a worker dies."""

    def interrupt(self) -> None:  # noqa: B027 - nothing interrupts a worker in this process
        """Make a step that waits for other workers raise; called from another thread.

        The workers cannot be used afterwards.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers, and free their resources. A second call is a no-op."""


# Executor with a single worker in this process.


class InProcessExecutor(Executor):
    """Runs a single worker in this process.

    Attributes:
        worker: the worker; None after :meth:`shutdown`.

    Raises:
        InvalidArgumentError: *config* asks for more ranks.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None = None,
    ) -> None:
        if config.parallel.tensor_parallel_size > 1:
            raise InvalidArgumentError(
                f"tensor_parallel_size={config.parallel.tensor_parallel_size}, but "
                f"{type(self).__name__} runs one rank. The platform {platform.name!r} chose it."
            )
        worker: type[Worker] = part(platform, "get_worker_cls", config)
        with ExitStack() as stack:
            stack.enter_context(cpu_threads(config.cpu_threads))
            self.worker: Worker | None = worker(model, config, platform)
            self.worker.init_device()
            self.worker.load_model(progress)
            self.facts = self.worker.facts()
            self._threads = stack.pop_all()  # until the engine shuts down

    def allocate(self, plan: CachePlan) -> None:
        worker = self._running()
        worker.allocate(plan)
        worker.warm_up()

    def execute(self, steps: Sequence[SequenceStep]) -> list[Sampled]:
        return self._running().execute(steps)

    def shutdown(self) -> None:
        self.worker = None
        self._threads.close()

    def _running(self) -> Worker:
        if self.worker is None:
            raise EngineDeadError("The engine is shut down.")
        return self.worker


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
            found: dict[int, Connection] = {}
            for _ in others:
                connection = listener.accept()
                found[int(connection.recv_bytes())] = connection
        return found

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


def is_follower(tensor_parallel_size: int) -> bool:
    """Whether this process is a rank other than 0 of an engine of that size.

    Raises:
        InvalidArgumentError: the number of launched processes differs.
    """
    launch = _launch_of(tensor_parallel_size)
    return launch is not None and launch.rank > 0


def is_launched(tensor_parallel_size: int) -> bool:
    """Whether a launcher, such as ``torchrun``, has started the ranks of such an engine.

    Raises:
        InvalidArgumentError: the number of launched processes differs.
    """
    return _launch_of(tensor_parallel_size) is not None


def _launch_of(tensor_parallel_size: int) -> Launch | None:
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
