"""Moves tensors between the ranks of an engine."""

from opweave.engine.communicators.base import Communicator, RankGroup
from opweave.engine.communicators.shared_memory import SharedMemoryCommunicator
from opweave.engine.communicators.torch_group import TorchCommunicator

__all__ = ["Communicator", "RankGroup", "SharedMemoryCommunicator", "TorchCommunicator"]
