"""Moves tensors between the ranks of an engine."""

from opweave_engine.parallel.communicators.base import Communicator, RankGroup
from opweave_engine.parallel.communicators.shared_memory import SharedMemoryCommunicator
from opweave_engine.parallel.communicators.torch_group import TorchCommunicator

__all__ = ["Communicator", "RankGroup", "SharedMemoryCommunicator", "TorchCommunicator"]
