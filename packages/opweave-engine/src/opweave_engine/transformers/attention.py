"""Attention of transformers models over the sequences of a forward context."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from opweave.registration import bound
from opweave_engine.models.blocks import Attention

# Errors of the transformers backend.


class NotSuitableError(Exception):
    """A way to run a model does not suit it; the message says why. Never raised to users."""


# Attention of transformers models over the sequences of a forward context.
#
# transformers looks attention functions and mask functions up by name. The functions here pass
# the queries, keys and values of packed sequences to :class:`opweave_engine.models.Attention`,
# which the engine backs with a paged cache.


NAME = "opweave_packed"
_CHILD = "opweave_attention"  # the name of the Attention in the module that calls it
# Arguments that are followed, or do not change the result in evaluation mode.
_SUPPORTED_OPTIONS = {
    "cache_position", "dropout", "head_mask", "is_causal", "output_attentions", "past_key_values",
    "position_ids", "sliding_window", "softcap", "training", "use_cache",
}  # fmt: skip


class AttentionRecorder:
    """Learns the attention layers of a model while it runs on one sequence."""

    def __init__(self) -> None:
        self.masks: dict[int, tuple[Tensor, int | None]] = {}
        self.callers: list[nn.Module] = []

    def mask(self, visible: Callable[..., Any], device: torch.device) -> Tensor:
        """Return a tensor that stands for the mask, by which :meth:`layer` recognizes it."""
        placeholder = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        self.masks[placeholder.untyped_storage().data_ptr()] = placeholder, _window_of(visible)
        return placeholder

    def layer(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        options: dict[str, Any],
    ) -> None:
        """Add an :class:`Attention` to *module*, which calls the attention function.

        Raises:
            NotSuitableError: opweave's attention does not support the options of the call.
        """
        name = type(module).__name__
        if module in self.callers:
            raise NotSuitableError(f"{name} attends twice in one forward")
        used = [key for key, value in options.items() if value is not None and value is not False]
        if unsupported := [option for option in used if option not in _SUPPORTED_OPTIONS]:
            raise NotSuitableError(f"{name} uses {', '.join(unsupported)}")
        if query.shape[0] != 1:
            raise NotSuitableError(f"{name} changes the batch size")
        window, soft_cap = self._window(name, module, mask, options), options.get("softcap")
        (_, heads, *_), (_, kv_heads, _, size) = query.shape, key.shape
        index, value_size = len(self.callers), value.shape[3]
        attention = Attention(
            index, heads, kv_heads, size, window, scale, soft_cap, value_dim=value_size
        )
        self.callers.append(module)
        module.add_module(_CHILD, attention)

    def _window(
        self, name: str, module: nn.Module, mask: Tensor | None, options: dict[str, Any]
    ) -> int | None:
        if mask is not None:
            recorded = self.masks.get(mask.untyped_storage().data_ptr())
            if recorded is None:
                raise NotSuitableError(f"{name} has a mask of its own")
            return recorded[1]
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise NotSuitableError(f"{name} is not causal")
        if options.get("sliding_window") is not None:
            raise NotSuitableError(f"{name} has a sliding window without a mask")
        return None


_recorder: ContextVar[AttentionRecorder | None] = ContextVar("opweave_recorder", default=None)


@contextmanager
def recording() -> Iterator[AttentionRecorder]:
    """Record the attention layers of the model that runs inside the block."""
    recorder = AttentionRecorder()
    with bound(_recorder, recorder):
        yield recorder


def install(model: Any) -> None:
    """Make *model* use the functions of this module."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    model.set_attn_implementation(NAME)


def remove(model: Any, before: str) -> None:
    """Undo :func:`install`, and remove the layers that a recorder added.

    Args:
        model: any model of transformers.
        before: the attention that it used.
    """
    for module in model.modules():
        module._modules.pop(_CHILD, None)
    model.set_attn_implementation(before)


def mask(
    *, mask_function: Callable[..., Any], device: Any = "cpu", **options: Any
) -> Tensor | None:
    """Return None: each layer knows its window. See ``AttentionMaskInterface`` of transformers."""
    if torch.compiler.is_dynamo_compiling():
        return None
    recorder = _recorder.get()
    return None if recorder is None else recorder.mask(mask_function, device)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend in the current forward context. See ``AttentionInterface`` of transformers.

    Args:
        module: the calling layer.
        query: ``(1, query_heads, T, head_size)``.
        key: ``(1, kv_heads, T, head_size)``.
        value: ``(1, kv_heads, T, value_size)``.
        attention_mask: the result of :func:`mask`.
        scaling: factor on the scores.
        options: further options of transformers, checked while a model is recorded.

    Returns:
        ``(1, T, query_heads, value_size)``, and None.
    """
    if not torch.compiler.is_dynamo_compiling() and (recorder := _recorder.get()) is not None:
        recorder.layer(module, query, key, value, attention_mask, scaling, options)
    attend: Attention = module._modules[_CHILD]  # type: ignore[assignment]
    packed = attend(*(x[0].transpose(0, 1) for x in (query, key, value)))
    return packed.unflatten(-1, (query.shape[1], -1))[None], None


def _window_of(visible: Callable[..., Any]) -> int | None:
    """Return the size of the sliding window of a mask function; None: every earlier token.

    Raises:
        NotSuitableError: the mask is neither causal nor a causal sliding window.
    """
    windows = {_distance(visible, query) for query in (1 << 20, (1 << 20) + 1, (1 << 20) + 37)}
    if len(windows) > 1:
        raise NotSuitableError("its mask is neither causal nor a sliding window")
    return windows.pop()


def _distance(visible: Callable[..., Any], query: int) -> int | None:
    zero = torch.tensor(0)

    def sees(key: int) -> bool:
        try:
            return bool(visible(zero, zero, torch.tensor(query), torch.tensor(key)))
        except Exception as error:  # a mask of the tokens at hand, such as of padding
            raise NotSuitableError("its mask depends on the input") from error

    if sees(query + 1) or not sees(query):
        raise NotSuitableError("its attention is not causal")
    if sees(0):
        return None
    low, high = 1, query  # the token sees low keys at least, and high at most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sees(query - middle + 1) else (low, middle - 1)
    return low
