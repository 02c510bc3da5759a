"""The context of a forward pass, which opaque ops and attention layers read."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from opweave.registration import bound
from opweave_vllm.vllm_api.config import VllmConfig

__all__ = [
    "ForwardContext", "get_forward_context", "is_forward_context_available",
    "override_forward_context", "set_forward_context",
]  # fmt: skip


@dataclass
class ForwardContext:
    """The state of a forward pass that layers can read.

    Attributes:
        no_compile_layers: the layers that opaque ops call, by prefix.
        attn_metadata: the metadata of attention, usually by layer.
        slot_mapping: the slots of the new tokens by layer.
        additional_kwargs: further values of the platform.
    """

    no_compile_layers: dict[str, Any] = field(default_factory=dict)
    attn_metadata: Any = None
    slot_mapping: Any = None
    virtual_engine: int = 0
    additional_kwargs: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[ForwardContext | None] = ContextVar("opweave_vllm_forward", default=None)


def is_forward_context_available() -> bool:
    """Return whether a forward pass is running in this thread or asyncio task."""
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """Return the context of the forward pass.

    Raises:
        AssertionError: no forward pass is running.
    """
    context = _current.get()
    if context is None:
        raise AssertionError(
            "forward context is not set; run the layer inside set_forward_context(...). opweave's "
            "engine has opweave_engine.models.forward_context.current_forward_context instead."
        )
    return context


def override_forward_context(
    forward_context: ForwardContext | None,
) -> AbstractContextManager[None]:
    """Use this context inside the block, in this thread or asyncio task only."""
    return bound(_current, forward_context)


@contextmanager
def set_forward_context(
    attn_metadata: Any,
    vllm_config: VllmConfig,
    *,
    virtual_engine: int = 0,
    slot_mapping: Any = None,
    no_compile_layers: dict[str, Any] | None = None,
    additional_kwargs: dict[str, Any] | None = None,
    **unused: Any,
) -> Iterator[None]:
    """Run the block as a forward pass; *vllm_config* and further arguments are not used.

    opweave's configurations hold no layers, so *no_compile_layers* is an argument here.
    """
    context = ForwardContext(
        no_compile_layers or {},
        attn_metadata,
        slot_mapping,
        virtual_engine,
        additional_kwargs or {},
    )
    with override_forward_context(context):
        yield
