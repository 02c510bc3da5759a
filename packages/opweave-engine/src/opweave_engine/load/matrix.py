"""A quantized matrix of a checkpoint, as a linear layer keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opweave.ir.ops.low_bit import dequantized_w4
from opweave.layers.linear import LinearMethod
from opweave.layers.linear_methods import (
    GROUP,
    ActivationScheme,
    GroupedInt4Method,
    W8A8Method,
    Weight8Method,
)
from opweave_engine.errors import CheckpointError
from opweave_engine.models.weights import shown_name

# Rounds a matrix to int4 in groups, in the layout of compressed-tensors' pack-quantized.


_LEAST, _GREATEST = -8, 7
# Scales that are tried for each group, as shares of the one that clips nothing.
_SHARES = tuple(1 - 0.025 * step for step in range(11))
_ROWS = 1024  # rounded at once, so that intermediate results stay small


def quantized_int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Return the tensors of a symmetric int4 matrix, by the last part of their names.

    Numbers are rounded to the nearest. The scale of a group is the one of a few that gives the
    least squared error, because clipping the largest number often pays (arXiv:1902.01917).

    Args:
        weight: ``(out, in)``, float32, float16 or bfloat16; finite.
        group: numbers in a row that share a scale; it divides the inputs, and 8 divides it.
    """
    parts = [_rounded(rows, group) for rows in torch.split(weight, _ROWS)]
    q, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    packed = q[:, ::2] | (q[:, 1::2] << 4)
    return {
        "weight_packed": packed.view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _rounded(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return numbers from 0 to 15, ``(out, in)``, and scales ``(out, in / group)``."""
    grouped = torch.unflatten(weight.float(), 1, (-1, group))
    whole = grouped.abs().amax(-1, keepdim=True) / _GREATEST
    best = torch.full_like(whole, torch.inf)
    q, scale = torch.zeros_like(grouped), torch.ones_like(whole)
    kind = torch.finfo(weight.dtype)
    # Scales of float16 may be subnormal, so that small weights are not rounded to zero.
    least = max(kind.tiny * kind.eps, torch.finfo(torch.float32).tiny)
    for share in _SHARES:
        # The numbers are rounded for the scale as it is stored.
        tried = (whole * share).clamp(min=least).to(weight.dtype).float()
        rounded = (grouped / tried).round().clamp(_LEAST, _GREATEST)
        error = (rounded * tried - grouped).square().sum(-1, keepdim=True)
        is_better = error < best
        q, scale = torch.where(is_better, rounded, q), torch.where(is_better, tried, scale)
        best = torch.where(is_better, error, best)
    numbers = (q - _LEAST).to(torch.uint8).flatten(1)
    return numbers, scale.squeeze(-1).to(weight.dtype)


# The matrix, in all supported formats.


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Tensors = Mapping[str, Tensor]  # of one module, by the last part of their names


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix ``(out, in)``.

    Attributes:
        shape: of the matrix.
        method: how a linear layer keeps it; None if no layer can.
        parameters: by the names that *method* uses; empty without a method.
        dense: the values, float32; None if they follow from *parameters*.
    """

    shape: tuple[int, int]
    method: LinearMethod | None
    parameters: Tensors
    dense: Tensor | None = None

    def reordered(self, order: Tensor | None) -> QuantizedMatrix:
        """Return a dense matrix whose columns are those of the inputs *order*, in order."""
        if order is None or self.dense is None:
            return self
        return replace(self, dense=self.dense[:, torch.argsort(order).to(self.dense.device)])

    def parameters_for(self, method: LinearMethod) -> dict[str, Tensor]:
        """Return the parameters for a layer whose *method* may divide blocks into smaller ones."""
        rows = method.block_rows if isinstance(method, W8A8Method) else None
        if rows is None:
            return dict(self.parameters)
        scale = self.parameters["scale"].repeat_interleave(GROUP // rows, 0)
        return {**self.parameters, "scale": scale[: self.shape[0] // rows].contiguous()}

    def values(self) -> Tensor:
        """Return the matrix in float32."""
        if self.dense is not None:
            return self.dense
        weight, scale = self.parameters["weight"], self.parameters["scale"].float()
        if isinstance(self.method, (Weight8Method, W8A8Method)):
            return weight.float() * (scale[:, None] if scale.ndim == 1 else _spread(scale, weight))
        assert isinstance(self.method, GroupedInt4Method), self.method
        offset = self.parameters.get("offset")
        found = dequantized_w4(weight, scale, offset, torch.float32)
        if self.method.is_ordered:
            return found[:, torch.argsort(self.parameters["order"])]
        return found


def grouped_int4(
    module: str, q: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None
) -> QuantizedMatrix:
    """Return the matrix ``(q - zero) * scale`` as ``ir.ops.linear_w4a16`` takes it.

    Args:
        module: its name, for errors.
        q: ``(out, in)`` uint8, 0 to 15.
        scale: ``(out, groups)``.
        zero: ``(out, groups)``, 0 to 16; None: 8.
        order: ``(in,)``, the input of each column of *q*; None: in order.
    """
    if q.shape[1] % (2 * scale.shape[1]):
        wanted = f"scales of equal, even groups of {q.shape[1]} inputs"
        raise misfit(module, "weight", scale, wanted)
    if zero is not None and bool((zero == 8).all()):
        zero = None
    parameters = {"weight": q[:, ::2] | (q[:, 1::2] << 4), "scale": scale}
    if zero is not None:
        # In float32: the products have more bits than a scale of 16 bits has.
        scale = parameters["scale"] = scale.float()
        parameters["offset"] = -zero.to(scale.device) * scale
    if order is not None:
        parameters["order"] = order
    method = GroupedInt4Method(
        q.shape[1] // scale.shape[1], scale.dtype, zero is not None, order is not None
    )
    return QuantizedMatrix((q.shape[0], q.shape[1]), method, parameters)


def dense_matrix(q: Tensor, scale: Tensor, zero: Tensor | None = None) -> QuantizedMatrix:
    """Return the matrix ``(q - zero) * scale``, which no layer keeps quantized.

    Args:
        q: ``(out, in)``.
        scale: ``(out, groups)``.
        zero: likewise.
    """
    wide = q.float().view(*scale.shape, -1)
    if zero is not None:
        wide = wide - zero.to(wide.device).float()[..., None]
    values = (wide * scale.float()[..., None]).flatten(1)
    return QuantizedMatrix((q.shape[0], q.shape[1]), None, {}, values)


def rows8(
    module: str,
    tensors: Tensors,
    weight: Tensor,
    scale: Tensor,
    activations: ActivationScheme | None = None,
) -> QuantizedMatrix:
    """Return a matrix of 8 bits with one scale for each row, or for all of them.

    Args:
        module: its name, for errors.
        tensors: its tensors, of which a static scheme of activations needs one.
        weight: ``(out, in)``.
        scale: one number, or one for each row.
        activations: how activations are quantized; None: not at all.
    """
    rows = weight.shape[0]
    if scale.numel() not in (1, rows):
        raise misfit(module, "weight_scale", scale, f"one number, or one for each of {rows} rows")
    wide = scale.float().reshape(-1).expand(rows).contiguous()
    parameters = {"weight": weight, "scale": wide}
    shape = (rows, weight.shape[1])
    if activations is None:
        return QuantizedMatrix(shape, Weight8Method(weight.dtype), parameters)
    if activations.is_static:
        given = tensors.get("input_scale", tensors.get("activation_scale"))
        if given is None or given.numel() != 1:
            given = require_shape(module, tensors, "input_scale", FLOATS, 1)
        parameters["input_scale"] = given.float().reshape(1)
    return QuantizedMatrix(shape, W8A8Method(weight.dtype, activations), parameters)


def is_blocked(weight: Tensor, scale: Tensor) -> bool:
    """Whether *scale* has a number for each block of a float8 *weight*."""
    return (
        weight.dtype is torch.float8_e4m3fn
        and scale.ndim == 2
        and scale.numel() > 1
        and scale.shape != (weight.shape[0], 1)
    )


def blocks8(
    module: str, weight: Tensor, scale: Tensor, activations: ActivationScheme | None
) -> QuantizedMatrix:
    """Return a float8 matrix with a scale for each block of 128 rows and columns.

    A layer keeps it quantized if activations are, too, and there are only whole columns of blocks.
    """
    shape = (weight.shape[0], weight.shape[1])
    wanted = tuple(-(-size // GROUP) for size in shape)
    if tuple(scale.shape) != wanted:
        message = f"{wanted}, one for each {GROUP}x{GROUP} block"
        raise misfit(module, "weight_scale_inv", scale, message)
    if activations is None or activations.is_static or shape[1] % GROUP:
        return QuantizedMatrix(shape, None, {}, weight.float() * _spread(scale.float(), weight))
    method = W8A8Method(weight.dtype, activations, GROUP)
    return QuantizedMatrix(shape, method, {"weight": weight, "scale": scale.float()})


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """Return a number for each element of *weight*, from those of blocks."""
    wide = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return wide[: weight.shape[0], : weight.shape[1]]


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned values in the last dimension of *packed*, lowest bits first, uint8.

    Args:
        packed: int32 or uint8.
        bits: 4 or 8.
    """
    data = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def require_shape(
    module: str, tensors: Tensors, leaf: str, dtypes: tuple[torch.dtype, ...], *shape: int | None
) -> Tensor:
    """Return the tensor *leaf* of *module*.

    Args:
        module: its name, for errors.
        tensors: its tensors.
        leaf: the name of one.
        dtypes: the possible ones.
        shape: that it must have; None: any size.

    Raises:
        CheckpointError: it is missing, or has another shape or dtype.
    """
    found = tensors.get(leaf)
    if found is None:
        raise CheckpointError(
            f"{shown_name(module)} is quantized, but the checkpoint has no {leaf} for it. Download "
            "or copy the checkpoint again."
        )
    fits = found.ndim == len(shape) and all(
        size in (None, own) for size, own in zip(shape, found.shape, strict=True)
    )
    if not fits or found.dtype not in dtypes:
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise misfit(module, leaf, found, f"{names} ({wanted})")
    return found


def misfit(module: str, leaf: str, found: Tensor, wanted: str) -> CheckpointError:
    """Return the error for a tensor of another form."""
    dtype = str(found.dtype).removeprefix("torch.")
    return CheckpointError(
        f"{shown_name(module)}.{leaf} is {dtype} {tuple(found.shape)}; it must be {wanted}. The "
        "checkpoint is damaged, or its quantization_config does not belong to it."
    )


def sorted_columns(module: str, index: Tensor, groups: int) -> Tensor | None:
    """Return the order of inputs in which each group's are together; None if they are already.

    Args:
        module: its name, for errors.
        index: ``(in,)``, the group of each input.
        groups: the number of groups, which must have the same size.

    Raises:
        CheckpointError: the index is not one of equal groups.
    """
    size = index.shape[0] // groups
    expected = torch.arange(groups).repeat_interleave(size)
    order = torch.argsort(index, stable=True)
    if not torch.equal(index[order].long(), expected):
        raise CheckpointError(
            f"{shown_name(module)}: g_idx does not name {groups} groups of {size} inputs; groups "
            "of different sizes are not supported."
        )
    return None if torch.equal(index.long(), expected) else order
