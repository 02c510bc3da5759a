"""Whether calls of ops are traced as one torch op, or as their implementation."""

from contextlib import AbstractContextManager
from contextvars import ContextVar

from opweave.registration import bound

_default = True
_scoped: ContextVar[bool | None] = ContextVar("opweave_vllm_api_torch_wrap", default=None)


def torch_wrap_enabled() -> bool:
    """Whether ops are traced as torch ops; True by default."""
    scoped = _scoped.get()
    return _default if scoped is None else scoped


def set_default_torch_wrap(enable: bool) -> None:
    """Set for the process whether ops are traced as torch ops."""
    global _default
    _default = enable


def enable_torch_wrap(enable: bool = True) -> AbstractContextManager[None]:
    """Set it inside the block, in this thread or asyncio task only."""
    return bound(_scoped, enable)
