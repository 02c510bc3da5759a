"""Linear maps, and several of them computed as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from opweave import ir


def weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Return an uninitialised parameter that needs no gradient; a loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias``: ``(..., in_features)`` to ``(..., out_features)``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features, dtype=dtype, device=device)
        self.bias = weight(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = ir.ops.linear(x, self.weight, self.bias)
        return output


class MergedLinear(Linear):
    """Several linear maps of one input, in one product: their outputs side by side.

    Args:
        parts: the name that checkpoints give each map, and its number of output features, in order.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = dict(parts)

    def split(self, output: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
        """Return the part of *output* that each map computed, as views."""
        return torch.split_with_sizes(output, list(self.parts.values()), dim)


def checkpoint_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of *module* holds, by the names it gives them.

    The tensors are the module's own memory: what is written to them is loaded. A
    merged linear map counts as its parts.
    """
    return dict(_tensors(module, ""))


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=False):
        if not isinstance(module, MergedLinear):
            yield prefix + name, parameter.data
            continue
        parent = prefix.removesuffix(".").rpartition(".")[0]
        for part, rows in zip(module.parts, module.split(parameter.data, dim=0), strict=True):
            yield f"{parent}.{part}.{name}", rows
    for name, child in module.named_children():
        yield from _tensors(child, f"{prefix}{name}.")
