"""The configuration of tensor and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.config.checks import check_count, check_seconds
from opweave.config.origin import Config
from opweave.ir.errors import SettingError


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Tensor-parallel ranks and data-parallel replicas.

    Attributes:
        tensor_parallel_size: ranks that each hold a part of every layer.
        data_parallel_size: replicas of the model, each with *tensor_parallel_size* ranks; several
            replicas run as Ray actors.
        data_parallel_address: ``"host:port"`` of a Ray cluster, or ``"auto"`` for the one of this
            machine; None: RAY_ADDRESS, else the engine starts Ray and stops it on shutdown.
        timeout: seconds without a response after which a rank or replica counts as failed. It
            includes the time by which one rank compiles longer than another.

    Raises:
        SettingError: (a ValueError) a value is out of range, or *data_parallel_address* is given
            without several replicas.
    """

    tensor_parallel_size: int = 1
    timeout: float = 60.0
    data_parallel_size: int = 1
    data_parallel_address: str | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_count(owner, "tensor_parallel_size", self.tensor_parallel_size)
        check_count(owner, "data_parallel_size", self.data_parallel_size)
        check_seconds(owner, "timeout", self.timeout)
        address = self.data_parallel_address
        if address is not None and (not isinstance(address, str) or not _is_address(address)):
            raise SettingError(
                f"{owner}: data_parallel_address={address!r} must be host:port of a Ray cluster, "
                "auto, or None. ray:// addresses are not supported; run the program on a machine "
                "of the cluster."
            )
        if address is not None and self.data_parallel_size == 1:
            raise SettingError(
                f"{owner}: data_parallel_address={address!r} needs several replicas, but "
                "data_parallel_size is 1. Raise data_parallel_size, or remove the address."
            )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return text == "auto" or (bool(host) and "/" not in host and port.isdecimal())
