"""What an engine and its replicas tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from logging import LogRecord
from pathlib import Path

from opweave.config import EngineConfig
from opweave.engine.embedding.pooling_params import PoolingParams
from opweave.engine.metrics.stats import EngineStats
from opweave.engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave.engine.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What a replica is to load.

    Attributes:
        agreement: what holds in the process that orders it, as JSON.
        model: the directory of a checkpoint; the same on every machine.
        config: of the engine.
        model_name: how clients call the model.
        neighbours: how many replicas are on its machine, itself included.
        log_level: from which it says what it logs.
    """

    agreement: str
    model: Path
    config: EngineConfig
    model_name: str
    neighbours: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt to answer, or to embed.

    Attributes:
        request_id: its name.
        prompt: a text, or token ids.
        params: how to choose tokens, or to make a vector.
        priority: a lower number goes first.
    """

    request_id: str
    prompt: str | Sequence[int]
    params: SamplingParams | PoolingParams
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """A replica has a process.

    Attributes:
        node: the name of the machine.
        pid: the number of the process there.
    """

    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request has failed.

    Attributes:
        request_id: its name.
        error: why.
    """

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What is new with a replica since its last report.

    Attributes:
        answers: what requests have got: outputs as deltas, vectors, and
            refusals.
        stats: of its engine, once that is loaded.
        max_model_len: of its engine, once that is loaded.
        vocab_size: of its model, once that is loaded.
        progress: tensors that are loaded, and all; None: nothing new.
        records: what it logs.
        failure: what it has died of.
    """

    answers: Sequence[RequestOutput | EmbeddingOutput | RequestFailure] = ()
    stats: EngineStats | None = None
    max_model_len: int | None = None
    vocab_size: int = 0
    progress: tuple[int, int] | None = None
    records: Sequence[LogRecord] = ()
    failure: Exception | None = None
