"""How a model is divided over devices, and how often it is there."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.config.checks import check_count, check_seconds
from opweave.config.origin import Config
from opweave.ir.errors import SettingError


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Over how many ranks a model is divided, and how many replicas of it share the requests.

    Attributes:
        tensor_parallel_size: ranks that each hold a part of every layer.
        data_parallel_size: replicas that each hold the whole model, over as many ranks; more than
            one are actors of Ray.
        data_parallel_address: ``"host:port"`` of a Ray cluster, or ``"auto"`` for the one of this
            machine; None: what RAY_ADDRESS says, else Ray is started here, for as long as needed.
        timeout: seconds that a rank waits for the others, and an engine for a sign of its replicas,
            before it gives them up; the time that one compiles longer than another counts, too.

    Raises:
        SettingError: (a ValueError) a value is out of range, or there is an address without
            several replicas.
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
                "auto, or None. For one that is reached through ray://, run the program on a "
                "machine of the cluster."
            )
        if address is not None and self.data_parallel_size == 1:
            raise SettingError(
                f"{owner}: data_parallel_address={address!r} is the cluster for several replicas, "
                "but data_parallel_size is 1. Raise that, or leave the address out."
            )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return text == "auto" or (bool(host) and "/" not in host and port.isdecimal())
