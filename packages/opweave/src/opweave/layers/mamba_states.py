"""States of state-space layers, and the parts that their mixers share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, count
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from opweave import ir
from opweave.ir.torch_ops import opaque_op
from opweave.layers.linear import MergedColumnParallelLinear, Part, ShardId
from opweave.layers.linear_methods import QuantConfig
from opweave.layers.registry import DuplicateLayerError, LayerArgumentError, PluggableLayer
from opweave.registration import bound

# Stateful layers, and their names, which are unique within a model.


_nameless = count()
_layers: ContextVar[dict[str, StatefulLayer] | None] = ContextVar(
    "opweave_stateful_layers", default=None
)


class StatefulLayer(PluggableLayer):
    """A layer that keeps a state of the earlier tokens for every sequence.

    Args:
        prefix: the name of this layer in its model, which identifies its states in the cache; by
            default a unique name.

    Attributes:
        state_shapes: the shape of a sequence's state on this rank, by kind.

    Raises:
        DuplicateLayerError: the model has another layer of that name.
    """

    state_shapes: Mapping[str, tuple[int, ...]]

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix or f"{type(self).__name__}#{next(_nameless)}"
        layers = _layers.get()
        if layers is None:
            return
        if self.prefix in layers:
            raise DuplicateLayerError(
                f"Duplicate layer name: {self.prefix!r}. Two layers of one model cannot keep their "
                "states under one name; give each its own prefix."
            )
        layers[self.prefix] = self


@contextmanager
def stateful_layers() -> Iterator[dict[str, StatefulLayer]]:
    """Collect the stateful layers of the model that is built inside the block, by name."""
    layers: dict[str, StatefulLayer] = {}
    with bound(_layers, layers):
        yield layers


def state_dtype(dtype: torch.dtype, kind: str) -> torch.dtype:
    """Return the dtype of the states of *kind* for activations of *dtype*.

    Convolution inputs keep their dtype. Scan states, which accumulate over a whole sequence, have
    at least float32.
    """
    return dtype if kind == "conv" else torch.promote_types(dtype, torch.float32)


# States of state-space layers for the earlier tokens of each sequence.


class StateCache:
    """The states of a model's layers, with a slot for each sequence.

    Memory for a layer is allocated on first use. A slot may be reused by another sequence without
    being cleared, because a sequence without an initial state does not read it.

    Args:
        num_slots: the number of slots.

    >>> StateCache(4).get("mixer", "conv", (6, 3), torch.float32, "cpu").shape
    torch.Size([4, 6, 3])
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise LayerArgumentError(f"num_slots={num_slots} is negative.")
        self.num_slots = num_slots
        self._states: dict[tuple[str, str], Tensor] = {}

    def get(
        self,
        layer: str,
        kind: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        """Return the states of one *kind* of a layer, ``(num_slots, *shape)``.

        Args:
            layer: the name of the layer in the model.
            kind: ``"conv"`` or ``"ssm"``.
            shape: the shape of one sequence's state.
            dtype, device: dtype and device of the states if they are not allocated yet.
        """
        states = self._states.get((layer, kind))
        if states is None:
            states = torch.zeros(self.num_slots, *shape, dtype=dtype, device=device)
            self._states[layer, kind] = states
        return states

    def put(self, layer: str, kind: str, states: Tensor) -> None:
        """Replace the states of a layer with *states*, which may be the same memory."""
        self._states[layer, kind] = states.detach()


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """The packed sequences of one forward, and the slots of their states.

    Attributes:
        query_start_loc: ``(sequences + 1,)``, int32: the first new token of each sequence.
        slot_idx: ``(sequences,)``, int32: the slot of each sequence; -1 for padding.
        has_initial_state: ``(sequences,)``, bool: whether the sequence has earlier tokens.
        cache: the states.
        num_decodes: the number of leading sequences in decode: one new token, and earlier tokens.
    """

    query_start_loc: Tensor
    slot_idx: Tensor
    has_initial_state: Tensor
    cache: StateCache
    num_decodes: int = 0

    @classmethod
    def of(
        cls,
        new_tokens: Sequence[int],
        known_tokens: Sequence[int],
        slots: Sequence[int],
        cache: StateCache,
        device: torch.device | str = "cpu",
    ) -> SequenceStates:
        """Describe sequences by their numbers of new and of earlier tokens, and their slots.

        Put sequences in decode first: this is fastest.

        Raises:
            LayerArgumentError: the three lists differ in length.
        """
        if not len(new_tokens) == len(known_tokens) == len(slots):
            raise LayerArgumentError(
                f"{len(new_tokens)} new_tokens, {len(known_tokens)} known_tokens and {len(slots)} "
                "slots do not fit; there must be one of each for every sequence."
            )
        decodes = [
            new == 1 and cached > 0 for new, cached in zip(new_tokens, known_tokens, strict=True)
        ]
        starts = [0, *accumulate(new_tokens)]
        return cls(
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor([cached > 0 for cached in known_tokens], dtype=torch.bool, device=device),
            cache,
            [*decodes, False].index(False),
        )

    def decodes(self) -> Tensor:
        """Return the slots of the sequences in decode."""
        return self.slot_idx[: self.num_decodes]

    def others(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return starts, slots and initial states of the sequences that are not in decode."""
        first = self.num_decodes
        starts = self.query_start_loc[first:] - first
        return starts, self.slot_idx[first:], self.has_initial_state[first:]

    def has_others(self, tokens: Tensor) -> bool:
        """Whether sequences are left that are not in decode, or *tokens* belong to no sequence.

        Also true if there are no sequences.
        """
        return not 0 < self.num_decodes == self.slot_idx.shape[0] == tokens.shape[0]


_current: ContextVar[SequenceStates | None] = ContextVar("opweave_sequence_states", default=None)
current_sequence_states = _current.get


def sequence_states(states: SequenceStates | None) -> AbstractContextManager[None]:
    """Make layers use *states* inside the block, in this thread or asyncio task."""
    return bound(_current, states)


def states_of(tokens: Tensor) -> SequenceStates:
    """Return the current states, or those of one new sequence of *tokens* if none are set."""
    current = current_sequence_states()
    if current is not None:
        return current
    return SequenceStates.of([tokens.shape[0]], [0], [0], StateCache(1), tokens.device)


# Convolutions and scans of the sequences of the current forward.
#
# To a compiler, each is one opaque op, which looks up the sequences and their states when it
# runs. So one graph serves any batch.


F = TypeVar("F", bound=Callable[..., Tensor])


def _in_context(name: str) -> Callable[[F], F]:
    """Return a decorator: in graphs, a call of the function is one opaque op of this *name*."""

    def decorate(run: F) -> F:
        opaque = opaque_op("opweave", name, run, _like_the_first)

        @wraps(run)
        def call(*args: Any) -> Tensor:
            result: Tensor = (opaque if torch.compiler.is_dynamo_compiling() else run)(*args)
            return result

        return cast(F, call)

    return decorate


def _like_the_first(x: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_in_context("causal_conv1d_in_context")
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: str, activation: str | None
) -> Tensor:
    """Convolve the sequences' tokens, ``(T, channels)``: ``ir.ops.causal_conv1d[_update]``.

    Args:
        x, weight, bias, activation: as in ``ir.ops.causal_conv1d``.
        layer: the name of the layer that owns the states.
    """

    def part(rows: slice) -> tuple[Tensor | None, ...]:
        return x[rows].clone(), weight, bias

    shape, ops = (x.shape[1], weight.shape[1] - 1), ir.ops
    options = {"activation": activation}
    return _advance(
        ops.causal_conv1d_update, ops.causal_conv1d, part, x, layer, "conv", shape, (), options
    )


@_in_context("selective_scan_in_context")
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    layer: str,
) -> Tensor:
    """Scan the sequences' tokens: ``ir.ops.selective_scan`` or ``selective_state_update``.

    Args:
        x, dt, a, b, c, d, z, dt_bias: as in ``ir.ops.selective_scan``.
        layer: the name of the layer that owns the states.
    """
    inputs = (x, dt, a, b, c, d, z, dt_bias)
    return _scan(ir.ops.selective_scan, inputs, layer, (*a.shape,), (), {})


@_in_context("ssd_chunk_scan_in_context")
def ssd_chunk_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, layer: str, chunk_size: int = 256, dt_min: float | None = None,
    dt_max: float | None = None,
) -> Tensor:  # fmt: skip
    """Scan the sequences' tokens: ``ir.ops.ssd_chunk_scan`` or ``selective_state_update``.

    Args:
        x, dt, a, b, c, d, z, dt_bias, chunk_size, dt_min, dt_max: as in ``ir.ops.ssd_chunk_scan``.
        layer: the name of the layer that owns the states.
    """
    inputs, shape = (x, dt, a, b, c, d, z, dt_bias), (*x.shape[1:], b.shape[-1])
    limits = {"dt_min": dt_min, "dt_max": dt_max}
    return _scan(ir.ops.ssd_chunk_scan, inputs, layer, shape, (chunk_size,), limits)


def _scan(
    op: ir.IrOp,
    inputs: tuple[Any, ...],
    layer: str,
    shape: tuple[int, ...],
    options: tuple[int, ...],
    limits: dict[str, Any],
) -> Tensor:
    """Scan with *op*, whose state has this *shape*; *limits* are those of the time step."""
    x, dt, a, b, c, d, z, dt_bias = inputs

    def part(rows: slice) -> tuple[Tensor | None, ...]:
        gate = None if z is None else z[rows]
        return x[rows].clone(), dt[rows], a, b[rows], c[rows], d, gate, dt_bias

    update = ir.ops.selective_state_update
    return _advance(update, op, part, x, layer, "ssm", shape, options, limits)


def _advance(
    update: ir.IrOp,
    op: ir.IrOp,
    part: Callable[[slice], tuple[Tensor | None, ...]],
    x: Tensor,
    layer: str,
    kind: str,
    shape: tuple[int, ...],
    options: tuple[int, ...],
    named: dict[str, Any],
) -> Tensor:
    """Run *update* on the sequences with one new token, and *op* on the others.

    *part* returns the arguments for some rows of *x*, of which *x* itself is a copy: only the state
    is given up, since a graph may go on to read x.
    """
    states = states_of(x)
    count, dtype = states.num_decodes, state_dtype(x.dtype, kind)
    state, results = states.cache.get(layer, kind, shape, dtype, x.device), []
    if count:
        tokens = part(slice(0, count))
        y, state = update.maybe_inplace(*tokens, state, states.decodes(), **named)
        results.append(y)
    if states.has_others(x):
        tokens = part(slice(count, None))
        y, state = op.maybe_inplace(*tokens, state, *states.others(), *options, **named)
        results.append(y)
    states.cache.put(layer, kind, state)
    return results[0] if len(results) == 1 else torch.cat(results)


# Merged column-parallel layers with some replicated outputs.


class MixedColumnParallelLinear(MergedColumnParallelLinear):
    """Merged column-parallel layers; each output is sharded over the ranks or replicated.

    Args:
        output_sizes: the features of each output.
        whole: the indices of the replicated outputs.

    See :class:`MergedColumnParallelLinear` for the others.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        whole: Collection[int] = (),
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
    ) -> None:
        self.whole = frozenset(whole)
        super().__init__(
            input_size,
            output_sizes,
            bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
        )

    def _parts(self) -> Mapping[ShardId, Part]:
        return {
            i: Part(size, 0, 1) if i in self.whole else self._part(size, f"output_sizes[{i}]")
            for i, size in enumerate(self.output_sizes)
        }


class CausalConv1d(MixedColumnParallelLinear):
    """Depthwise causal convolution of each sequence: ``ir.ops.causal_conv1d``.

    The weight is ``(channels, 1, K)``, as in a ``torch.nn.Conv1d`` with one group per channel.

    Args:
        channels: the channels of each of the concatenated inputs, on all ranks together.
        kernel_size: ``K``.
        layer: the name of the layer that owns the states.
        whole: the indices of the replicated inputs.
        bias: whether to add a bias.
        activation: see ``ir.ops.causal_conv1d``.
        params_dtype: dtype of weight and bias.
    """

    def __init__(
        self,
        channels: Sequence[int],
        kernel_size: int,
        layer: str,
        whole: Collection[int] = (),
        *,
        bias: bool,
        activation: str | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(kernel_size, channels, whole, bias, params_dtype, prefix=f"{layer}.conv1d")
        self.weight.data = self.weight.data[:, None]
        self.layer, self.activation = layer, activation

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of a sequence's state: this rank's channels, and the inputs kept per channel."""
        return self.weight.shape[0], self.weight.shape[2] - 1

    def forward(self, x: Tensor) -> Tensor:
        """Convolve *x*, ``(T, channels of this rank)``; return a tensor of the same shape."""
        return causal_conv1d(x, self.weight[:, 0], self.bias, self.layer, self.activation)
