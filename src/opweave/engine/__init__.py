"""The engine: loads a checkpoint and answers prompts."""

from opweave.engine.async_embedder import AsyncEmbedder
from opweave.engine.async_engine import AsyncEngine
from opweave.engine.chat import ChatTemplate
from opweave.engine.checkpoint import Checkpoint
from opweave.engine.client import EngineClient
from opweave.engine.core import EngineCore
from opweave.engine.data_parallel import DataParallelEngine
from opweave.engine.embedder import Embedder
from opweave.engine.errors import (
    CacheSizeError,
    ChatTemplateError,
    CheckpointError,
    CommunicatorError,
    EngineDeadError,
    EngineError,
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
from opweave.engine.loader import load_model
from opweave.engine.open_engine import open_engine
from opweave.engine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    RequestTimings,
)
from opweave.engine.pooling_params import PoolingParams
from opweave.engine.sampling_params import SamplingParams
from opweave.engine.stats import EngineStats, HistogramCounts
from opweave.engine.structured import StructuredOutputsParams
from opweave.engine.tokenizer import Tokenizer
from opweave.engine.usage import KernelUse

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
    "StructuredOutputsParams",
    "Tokenizer",
    "TokenizerError",
    "UnexpectedKeywordError",
    "UnsupportedCacheError",
    "load_model",
    "open_engine",
]
