"""Messages between an engine and its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from logging import LogRecord
from pathlib import Path

from opweave.config import EngineConfig
from opweave_engine.embedding.pooling_params import PoolingParams
from opweave_engine.metrics.stats import EngineStats
from opweave_engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.request.prompts import Prompt
from opweave_engine.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The model and the configuration that a replica loads.

    Attributes:
        agreement: the settings of the sending process, as JSON.
        model: the directory of a checkpoint; the same on every machine.
        config: the engine's configuration.
        model_name: the model's name in requests.
        neighbors: the number of replicas on its machine, including itself.
        log_level: the lowest level of log records that it reports.
    """

    agreement: str
    model: Path
    config: EngineConfig
    model_name: str
    neighbors: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request: a prompt to continue, or to embed.

    Attributes:
        request_id: the name of the request.
        prompt: a text, token ids, or a dict with one of them.
        params: sampling or pooling parameters.
        priority: the scheduling priority; lower numbers go first.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | PoolingParams
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """The process of a replica.

    Attributes:
        node: the name of its machine.
        pid: its process id there.
    """

    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request failed.

    Attributes:
        request_id: the name of the request.
        error: the reason.
    """

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The news of a replica since its last report.

    Attributes:
        answers: what requests have got: outputs as deltas, vectors, and
            refusals.
        stats: statistics of its engine, once that is loaded.
        max_model_len: the engine's limit, once that is loaded.
        vocab_size: the size of the vocabulary, once the model is loaded.
        progress: the number of tensors loaded so far and in total; None: unchanged.
        records: log records.
        failure: the error that it died of.
    """

    answers: Sequence[RequestOutput | EmbeddingOutput | RequestFailure] = ()
    stats: EngineStats | None = None
    max_model_len: int | None = None
    vocab_size: int = 0
    progress: tuple[int, int] | None = None
    records: Sequence[LogRecord] = ()
    failure: Exception | None = None
