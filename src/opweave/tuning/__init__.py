"""Record, replay and measure op calls, and choose implementations by measurement.

``opweave record``, ``replay``, ``bench`` and ``tune`` are the commands.
"""

from opweave.tuning.contest import Measurement, contest
from opweave.tuning.errors import TraceError, TuningError
from opweave.tuning.recorder import Recorder, record_calls
from opweave.tuning.replay import Replay, replay
from opweave.tuning.timing import Effort, Time
from opweave.tuning.trace import Trace, TracedCall

__all__ = [
    "Effort",
    "Measurement",
    "Recorder",
    "Replay",
    "Time",
    "Trace",
    "TraceError",
    "TracedCall",
    "TuningError",
    "contest",
    "record_calls",
    "replay",
]
