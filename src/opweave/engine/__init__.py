"""The inference engine: loads a checkpoint, and generates text or embeddings."""

from opweave.engine.chat import ChatTemplate
from opweave.engine.client.async_embedder import AsyncEmbedder
from opweave.engine.client.async_engine import AsyncEngine
from opweave.engine.client.engine_client import EngineClient
from opweave.engine.client.open_engine import open_engine
from opweave.engine.core import EngineCore
from opweave.engine.embedding.embedder import Embedder
from opweave.engine.embedding.pooling_params import PoolingParams
from opweave.engine.errors import (
    CacheSizeError,
    ChatTemplateError,
    CheckpointError,
    CommunicatorError,
    EngineDeadError,
    EngineError,
    GrammarQueueFullError,
    InvalidArgumentError,
    MissingDependencyError,
    NonFiniteLogitsError,
    NoTokenLeftError,
    PromptError,
    RankFailedError,
    ReplicaFailedError,
    SamplingParamsError,
    TokenizerError,
    UnexpectedKeywordError,
    UnsupportedCacheError,
)
from opweave.engine.llm import LLM
from opweave.engine.loading.checkpoint import Checkpoint
from opweave.engine.loading.loader import load_model
from opweave.engine.metrics.selection_report import KernelUse
from opweave.engine.metrics.stats import EngineStats, HistogramCounts
from opweave.engine.moved import support_old_paths
from opweave.engine.parallel.data_parallel import DataParallelEngine
from opweave.engine.request.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    RequestTimings,
    ScoreOutput,
)
from opweave.engine.sampling.sampling_params import SamplingParams
from opweave.engine.structured import StructuredOutputsParams
from opweave.engine.tokenization.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncEmbedder",
    "AsyncEngine",
    "CacheSizeError",
    "ChatTemplate",
    "ChatTemplateError",
    "Checkpoint",
    "CheckpointError",
    "CommunicatorError",
    "CompletionOutput",
    "DataParallelEngine",
    "Embedder",
    "EmbeddingOutput",
    "EngineClient",
    "EngineCore",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GrammarQueueFullError",
    "HistogramCounts",
    "InvalidArgumentError",
    "KernelUse",
    "Logprob",
    "MissingDependencyError",
    "NoTokenLeftError",
    "NonFiniteLogitsError",
    "PoolingParams",
    "PromptError",
    "RankFailedError",
    "ReplicaFailedError",
    "RequestOutput",
    "RequestTimings",
    "SamplingParams",
    "SamplingParamsError",
    "ScoreOutput",
    "StructuredOutputsParams",
    "Tokenizer",
    "TokenizerError",
    "UnexpectedKeywordError",
    "UnsupportedCacheError",
    "load_model",
    "open_engine",
]

support_old_paths()
