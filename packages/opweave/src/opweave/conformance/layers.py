"""Checks of layers: an oracle, weight loading, tensor parallelism. For tests of layers.

>>> import torch
>>> from opweave.conformance import layers
>>> layer = torch.nn.Linear(4, 2, bias=False)
>>> layers.check_oracle(layer, lambda x: x @ layer.weight.T, torch.randn(3, 4))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opweave.conformance.ranks import Rank, on_ranks
from opweave.conformance.snapshot import same_bits
from opweave.conformance.subject import NonconformingError
from opweave.ir.tolerance import DEFAULT_TOLERANCES, Tolerance

Weight = tuple[Any, ...]  # (name, tensor) or (name, tensor, shard_id)


def check_oracle(
    layer: Callable[..., Any],
    oracle: Callable[..., Any],
    *inputs: Any,
    tolerance: Tolerance | None = None,
) -> None:
    """Raise NonconformingError unless *layer* and *oracle* return the same.

    Args:
        tolerance: the tolerance; by default that of ops for the result's dtype.
    """
    with torch.no_grad():
        _check_same(layer(*inputs), oracle(*inputs), tolerance, "the oracle")


def load(layer: nn.Module, weights: Iterable[Weight]) -> None:
    """Load full weights into *layer*, each through the ``weight_loader`` of its parameter.

    Args:
        weights: ``(name, tensor)``, or ``(name, tensor, shard_id)`` for a part of a merged one.

    Raises:
        NonconformingError: the parameter does not exist, or does not have a ``weight_loader``.
    """
    parameters = dict(layer.named_parameters())
    for name, tensor, *shard in weights:
        if name not in parameters:
            raise NonconformingError(
                f"{type(layer).__name__} has no parameter {name!r}; it has {sorted(parameters)}."
            )
        loader = getattr(parameters[name], "weight_loader", None)
        if loader is None:
            raise NonconformingError(
                f"{type(layer).__name__}: parameter {name!r} has no weight_loader."
            )
        loader(parameters[name], tensor, *shard)


def check_loading(layer: nn.Module, weights: Iterable[Weight]) -> None:
    """Raise NonconformingError unless *weights* fill every parameter, the same each time."""
    listed = list(weights)
    first = _loaded(layer, listed)
    for name, value in first.items():
        if value.is_floating_point() and value.isnan().any():
            raise NonconformingError(
                f"{type(layer).__name__}: {int(value.isnan().sum())} of {value.numel()} elements "
                f"of {name!r} are not loaded."
            )
    for name, value in _loaded(layer, listed[::-1]).items():
        if not same_bits(value, first[name]):
            raise NonconformingError(
                f"{type(layer).__name__}: {name!r} depends on the order of loading."
            )


def check_ranks(
    build: Callable[[Rank | None], Callable[..., Any]],
    *inputs: Any,
    size: int = 2,
    tolerance: Tolerance | None = None,
) -> None:
    """Raise NonconformingError unless a layer on *size* ranks returns the same as on one.

    Args:
        build: returns the layer with loaded weights for a rank, or for a single rank if the
            argument is None. It is called in the rank's thread, and so is the layer.
    """
    with torch.no_grad():
        whole = build(None)(*inputs)
        parts = on_ranks(size, lambda rank: build(rank)(*inputs))
    for rank, part in enumerate(parts):
        _check_same(part, whole, tolerance, f"one rank alone (this is rank {rank} of {size})")


def _loaded(layer: nn.Module, weights: Iterable[Weight]) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan") if parameter.is_floating_point() else 0)
        load(layer, weights)
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def _check_same(found: Any, expected: Any, tolerance: Tolerance | None, what: str) -> None:
    for i, (a, b) in enumerate(zip(_tensors(found), _tensors(expected), strict=True)):
        atol, rtol = tolerance or DEFAULT_TOLERANCES.get(b.dtype, Tolerance(0, 0))
        try:
            torch.testing.assert_close(a, b, atol=atol, rtol=rtol, equal_nan=True)
        except AssertionError as error:
            message = " ".join(str(error).split())
            raise NonconformingError(f"output {i} is not that of {what}: {message}") from None


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result; None, as some layers return for a bias, is left out."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part for part in parts if part is not None]
