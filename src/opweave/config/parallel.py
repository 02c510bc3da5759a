"""How a model is divided over devices."""

from __future__ import annotations

from dataclasses import dataclass

from opweave.config.checks import check_count, check_seconds
from opweave.config.origin import Config


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Over how many ranks a model is divided.

    Attributes:
        tensor_parallel_size: ranks that each hold a part of every layer.
        timeout: seconds that a rank waits for the others before the engine gives up; the time that
            one compiles longer than another counts, too.

    Raises:
        SettingError: (a ValueError) a value is out of range.
    """

    tensor_parallel_size: int = 1
    timeout: float = 60.0

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "tensor_parallel_size", self.tensor_parallel_size)
        check_seconds(type(self).__name__, "timeout", self.timeout)
