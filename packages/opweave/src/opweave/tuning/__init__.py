"""Record, replay and measure op calls, and choose implementations by measurement.

``opweave record``, ``replay``, ``bench`` and ``tune`` are the commands.
"""

from opweave.tuning.measure import Cell, Measurement, Replay, Task, contest, replay
from opweave.tuning.timing import Effort, Machine, Time
from opweave.tuning.trace import (
    Recorder,
    Trace,
    TracedCall,
    TraceError,
    TuningError,
    TuningFileError,
    WorkerFailedError,
    record_calls,
)
from opweave.tuning.tuning_file import Tuned, TuningFile, tune

__all__ = [
    "Cell", "Effort", "Machine", "Measurement", "Recorder", "Replay", "Task", "Time", "Trace",
    "TraceError", "TracedCall", "Tuned", "TuningError", "TuningFile", "TuningFileError",
    "WorkerFailedError", "contest", "record_calls", "replay", "tune",
]  # fmt: skip
