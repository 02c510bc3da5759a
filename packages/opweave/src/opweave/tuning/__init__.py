"""Record, replay and measure op calls, and choose implementations by measurement.

``opweave record``, ``replay``, ``bench`` and ``tune`` are the commands.
"""

from opweave.tuning.cell import Cell
from opweave.tuning.contest import Measurement, contest
from opweave.tuning.errors import TraceError, TuningError, TuningFileError, WorkerFailedError
from opweave.tuning.machine import Machine
from opweave.tuning.recorder import Recorder, record_calls
from opweave.tuning.replay import Replay, replay
from opweave.tuning.timing import Effort, Time
from opweave.tuning.trace import Trace, TracedCall
from opweave.tuning.tune import Tuned, tune
from opweave.tuning.tuning_file import TuningFile
from opweave.tuning.worker import Task

__all__ = [
    "Cell",
    "Effort",
    "Machine",
    "Measurement",
    "Recorder",
    "Replay",
    "Task",
    "Time",
    "Trace",
    "TraceError",
    "TracedCall",
    "Tuned",
    "TuningError",
    "TuningFile",
    "TuningFileError",
    "WorkerFailedError",
    "contest",
    "record_calls",
    "replay",
    "tune",
]
