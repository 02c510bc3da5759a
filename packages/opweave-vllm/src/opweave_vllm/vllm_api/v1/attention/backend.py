"""Base classes of attention backends.

opweave's engine calls attention as an op, ``ir.ops.paged_attention``. A package uses these classes
with an engine of its own.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from torch import Tensor

__all__ = [
    "AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionMetadata", "AttentionType",
    "CommonAttentionMetadata",
]  # fmt: skip


class AttentionMetadata:
    """Base class of the metadata of an attention backend."""


class AttentionType(StrEnum):
    """The kind of attention of a layer."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    """The batches for which a backend can be recorded as a graph of the device."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass
class CommonAttentionMetadata:
    """The metadata of a batch that all attention backends need.

    Attributes:
        query_start_loc: ``(requests + 1,)``, the first token of each request; also on the CPU.
        seq_lens: ``(requests,)``, the length of each sequence.
        num_reqs: the number of requests.
        num_actual_tokens: the number of tokens.
        max_query_len: the most tokens of a request in the batch.
        max_seq_len: the length of the longest sequence.
        block_table_tensor: ``(requests, blocks)``, the KV cache blocks of each request.
        slot_mapping: ``(tokens,)``, the slot of each token.
        causal: whether a token attends to earlier tokens only.
        is_prefilling: ``(requests,)``, bool: the prompt is not complete.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    is_prefilling: Tensor | None = None


class AttentionImpl(ABC):
    """Computes the attention of a layer."""

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the result to *output*, and return it."""

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Transform the loaded weights; nothing by default."""
        return


class AttentionBackend(ABC):
    """Describes an attention backend."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return the name."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class that computes attention."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that builds the metadata."""

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return the module and the name of the class."""
        return cls.__module__, cls.__qualname__
