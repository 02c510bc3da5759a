"""Replicas as Ray actors."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from opweave import platforms
from opweave.config import ParallelConfig, environment
from opweave_engine.errors import InvalidArgumentError, ReplicaFailedError, require
from opweave_engine.parallel.rank import Launch
from opweave_engine.parallel.replicas import (
    CPU,
    LoadOrder,
    Method,
    News,
    Replica,
    ReplicaLocation,
    replica_resources,
    resource_name,
)

_log = logging.getLogger(__name__)

_ENDING = 5.0  # seconds to end after being told to
_STORE = 128 * 2**20  # bytes for what is larger than a message; reports are not
_CONNECTING = 10.0  # seconds to reach a cluster
_LOCAL = "local"
# No usage statistics, no warnings about variables of missing devices, and workers of normal
# priority, which other programs cannot starve.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
_THREADS = "OMP_NUM_THREADS"


class RayReplica(Replica):
    """A replica in a process of its own."""

    async def start(self, order: LoadOrder) -> None:
        self.take_log(order.log_level)
        await super().start(order)

    async def place(self) -> ReplicaLocation:
        """Return the replica's process."""
        node = require("ray", "ray").util.get_node_ip_address()
        return ReplicaLocation(node, os.getpid())


class RayGroup:
    """Implements :class:`~opweave_engine.parallel.replicas.ReplicaGroup` with Ray.

    If the program has initialized Ray, that connection is used and stays open. Otherwise, this
    class connects to a cluster or starts Ray on this machine, and shuts it down in :meth:`close`.

    Args:
        config: the number of replicas, their number of ranks, and the cluster.

    Raises:
        MissingDependencyError: Ray is not installed.
        InvalidArgumentError: the cluster is unreachable or too small, or this process is one of
            several launched by ``torchrun``.
    """

    def __init__(self, config: ParallelConfig) -> None:
        _check_launch(config)
        self._ray = require("ray", "ray")
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            _initialize(self._ray, config)
        self._is_closed = False
        self._actors: list[Any] = []
        self._waiting: dict[Any, int] = {}
        try:
            self._options = _options(self._ray, config)
            self._actors = [self._new(replica) for replica in range(config.data_parallel_size)]
        except BaseException:
            self.close()
            raise

    def tell(self, replica: int, method: Method, *arguments: object) -> None:
        if self._is_closed:
            return  # a remote call would start Ray again
        getattr(self._actors[replica], method).remote(*arguments)

    def receive(self, timeout: float) -> Sequence[tuple[int, News]]:
        if not self._waiting:  # all replicas have died and were not replaced
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(list(self._waiting), timeout=timeout)
        if len(self._waiting) > 1:  # all others that are ready
            ready, _ = self._ray.wait(
                list(self._waiting), num_returns=len(self._waiting), timeout=0
            )
        return [self._news(reference) for reference in ready]

    def renew(self, replica: int) -> None:
        own = self._ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] for node in self._ray.nodes() if node["NodeID"] == own):
            raise ReplicaFailedError("Ray does not run on the server's machine any more.")
        self._actors[replica] = self._new(replica)

    def kill(self, replica: int) -> None:
        self._waiting = {ref: each for ref, each in self._waiting.items() if each != replica}
        self._ray.kill(self._actors[replica])

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if stops := [actor.stop.remote() for actor in self._actors]:
            self._ray.wait(stops, num_returns=len(stops), timeout=_ENDING)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_own:
            self._ray.shutdown()

    def _new(self, replica: int) -> Any:
        actor = self._ray.remote(RayReplica).options(**self._options).remote()
        self._waiting[actor.place.remote()] = replica
        return actor

    def _news(self, reference: Any) -> tuple[int, News]:
        replica = self._waiting.pop(reference)
        try:
            news: News = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            failure = ReplicaFailedError(f"replica {replica} died: {_reason(error)}.")
            failure.__cause__ = error
            return replica, failure
        self._waiting[self._actors[replica].report.remote()] = replica
        return replica, news


def _check_launch(config: ParallelConfig) -> None:
    if Launch.from_environment() is not None:
        raise InvalidArgumentError(
            f"data_parallel_size={config.data_parallel_size}, but several processes were launched "
            "(WORLD_SIZE), as torchrun does. Ray starts the replicas and their ranks: run one "
            "process, or leave data_parallel_size out."
        )


def _initialize(ray: Any, config: ParallelConfig) -> None:
    """Connect to the configured cluster, or start Ray here. Never join another cluster."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # Ray would print several lines to stderr for each event that this engine logs in one.
    ray._private.worker._worker_logs_enabled = False
    address = config.data_parallel_address or os.environ.get("RAY_ADDRESS") or _LOCAL
    local: dict[str, Any] = {}
    if address == _LOCAL:
        ranks = config.data_parallel_size * config.tensor_parallel_size
        processors = max(ranks, torch.get_num_threads())
        _warn_of_few_processors(ranks)
        local = {
            "num_cpus": processors, "include_dashboard": False, "object_store_memory": _STORE,
        }  # fmt: skip
    else:
        replace(config, data_parallel_address=address)  # validates the address from the environment
    try:
        if address not in (_LOCAL, "auto"):
            host, _, port = address.rpartition(":")
            # Ray itself would retry for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _CONNECTING).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise InvalidArgumentError(
            f"Ray cannot be used at {address!r}: {first}. A cluster is started with ray start "
            "--head, and its address given with data_parallel_address or RAY_ADDRESS."
        ) from error


def _warn_of_few_processors(ranks: int) -> None:
    found = os.cpu_count() or ranks
    if platforms.current_platform.device_type == "cpu" and ranks > found:
        _log.warning(
            "%d ranks share %d processors; lower data_parallel_size or tensor_parallel_size.",
            ranks,
            found,
        )


def _options(ray: Any, config: ParallelConfig) -> dict[str, Any]:
    """Return the Ray options of each replica: its resources, and its environment."""
    ranks = config.tensor_parallel_size
    resource = resource_name(platforms.current_platform.device_type)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = replica_resources(nodes, config.data_parallel_size, {resource: ranks})
    processors, devices = room.pop(CPU), room.pop("GPU", 0)
    threads = os.environ.get(_THREADS) or str(max(1, processors // ranks))
    own = {name: os.environ[name] for name in environment.in_use()}
    own.pop(environment.API_KEY, None)
    return {
        "num_cpus": processors, "num_gpus": devices, "resources": room, "max_restarts": 0,
        "runtime_env": {"env_vars": {**own, _THREADS: threads}},
    }  # fmt: skip


def _reason(error: Exception) -> str:
    """Return Ray's reason for a death, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = next((line for line in lines if "because" in line or "Error" in line), lines[0])
    return found.partition(". ")[0].rstrip(".")
