"""State-space mixers, short convolutions, and the storage of their states."""

from opweave.layers.mamba.mixer import MambaMixer
from opweave.layers.mamba.mixer2 import MambaMixer2
from opweave.layers.mamba.plamo2 import Plamo2MambaMixer
from opweave.layers.mamba.short_conv import ShortConv
from opweave.layers.mamba.stateful import StatefulLayer, stateful_layers
from opweave.layers.mamba.states import SequenceStates, StateCache, sequence_states

__all__ = [
    "MambaMixer",
    "MambaMixer2",
    "Plamo2MambaMixer",
    "SequenceStates",
    "ShortConv",
    "StateCache",
    "StatefulLayer",
    "sequence_states",
    "stateful_layers",
]
