"""Moves tensors between the ranks of an engine."""

from opweave.engine.parallel.communicators.base import Communicator, RankGroup
from opweave.engine.parallel.communicators.shared_memory import SharedMemoryCommunicator
from opweave.engine.parallel.communicators.torch_group import TorchCommunicator

__all__ = ["Communicator", "RankGroup", "SharedMemoryCommunicator", "TorchCommunicator"]
