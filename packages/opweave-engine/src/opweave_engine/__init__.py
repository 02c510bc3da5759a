"""The inference engine: loads a checkpoint, and generates text or embeddings."""

from opweave_engine.async_engine import AsyncEmbedder, AsyncEngine
from opweave_engine.chat import ChatTemplate
from opweave_engine.client import EngineClient
from opweave_engine.core import EngineCore
from opweave_engine.embedding import Embedder
from opweave_engine.errors import (
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
from opweave_engine.llm import LLM
from opweave_engine.load.checkpoint import Checkpoint
from opweave_engine.load.loader import load_model
from opweave_engine.metrics import EngineStats, HistogramCounts, KernelUse
from opweave_engine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    FinishReason,
    Logprob,
    PoolingParams,
    RequestOutput,
    RequestTimings,
    ScoreOutput,
)
from opweave_engine.parallel.data_parallel import DataParallelEngine, open_engine
from opweave_engine.sampling.params import SamplingParams
from opweave_engine.structured import StructuredOutputsParams
from opweave_engine.tokenizer import Tokenizer

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
