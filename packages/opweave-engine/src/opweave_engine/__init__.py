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
    # Engines
    "LLM", "AsyncEmbedder", "AsyncEngine", "DataParallelEngine", "Embedder", "EngineClient",
    "EngineCore", "open_engine",
    # Checkpoints
    "Checkpoint", "ChatTemplate", "Tokenizer", "load_model",
    # Requests
    "PoolingParams", "SamplingParams", "StructuredOutputsParams",
    # Outputs
    "CompletionOutput", "EmbeddingOutput", "FinishReason", "Logprob", "RequestOutput",
    "RequestTimings", "ScoreOutput",
    # Statistics
    "EngineStats", "HistogramCounts", "KernelUse",
    # Errors
    "CacheSizeError", "ChatTemplateError", "CheckpointError", "CommunicatorError",
    "EngineDeadError", "EngineError", "GrammarQueueFullError", "InvalidArgumentError",
    "MissingDependencyError", "NoTokenLeftError", "NonFiniteLogitsError", "PromptError",
    "RankFailedError", "ReplicaFailedError", "SamplingParamsError", "TokenizerError",
    "UnexpectedKeywordError", "UnsupportedCacheError",
]  # fmt: skip
