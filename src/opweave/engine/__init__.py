"""The engine: loads a checkpoint and answers prompts."""

from opweave.engine.checkpoint import Checkpoint
from opweave.engine.checkpoint_model import load_checkpoint
from opweave.engine.errors import (
    CheckpointError,
    EngineError,
    InvalidArgumentError,
    MissingDependencyError,
    NonFiniteLogitsError,
    PromptError,
    SamplingParamsError,
    TokenizerError,
)
from opweave.engine.llm import LLM
from opweave.engine.loader import load_model
from opweave.engine.outputs import CompletionOutput, FinishReason, RequestOutput, RequestTimings
from opweave.engine.sampling_params import SamplingParams
from opweave.engine.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "Checkpoint",
    "CheckpointError",
    "CompletionOutput",
    "EngineError",
    "FinishReason",
    "InvalidArgumentError",
    "MissingDependencyError",
    "NonFiniteLogitsError",
    "PromptError",
    "RequestOutput",
    "RequestTimings",
    "SamplingParams",
    "SamplingParamsError",
    "Tokenizer",
    "TokenizerError",
    "load_checkpoint",
    "load_model",
]
