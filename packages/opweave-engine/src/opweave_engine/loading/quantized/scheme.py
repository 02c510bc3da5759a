"""Checks that tensors of compressed-tensors match the configuration.

The tensors alone do not tell that some are missing: int4 without zero points is symmetric, and a
scale for fewer groups is one for larger groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from opweave_engine.errors import CheckpointError
from opweave_engine.loading.quantized.matrix import Tensors
from opweave_engine.models.weights import shown_name


@dataclass(frozen=True)
class WeightScheme:
    """How ``config_groups`` says that weights are stored.

    Attributes:
        kind: ``"int"`` or ``"float"``.
        bits: of a weight.
        strategy: weights with one scale: ``"tensor"``, ``"channel"``, ``"group"`` or ``"block"``.
        group_size: of the strategy ``"group"``; None: not known.
        has_zeros: whether weights have zero points.
        has_index: whether inputs belong to groups in another order.
    """

    kind: str
    bits: int
    strategy: str
    group_size: int | None
    has_zeros: bool
    has_index: bool

    def faults(self, tensors: Tensors, shape: tuple[int, int]) -> Iterator[str]:
        """Yield the differences between *tensors* and this scheme.

        Args:
            tensors: of one module, by the last part of their names.
            shape: ``(out, in)`` of its matrix.
        """
        rows, columns = shape
        is_float = "weight" in tensors and tensors["weight"].dtype is torch.float8_e4m3fn
        if is_float != (self.kind == "float"):
            yield f"weights are not of the type {self.kind!r}"
        if "weight_packed" in tensors:
            bits = tensors["weight_packed"].shape[1] * 32 // columns
            if bits != self.bits:
                yield f"weight_packed has {bits} bits for each weight instead of {self.bits}"
        counts = {"tensor": 1, "channel": rows}
        if self.group_size:
            counts["group"] = rows * columns // self.group_size
        found, wanted = tensors["weight_scale"].numel(), counts.get(self.strategy)
        if wanted not in (None, found):
            yield f"weight_scale has {found} values instead of {wanted}"
        for is_needed, leaf in (
            (self.has_zeros, "weight_zero_point"),
            (self.has_index, "weight_g_idx"),
        ):
            if is_needed and leaf not in tensors:
                yield f"{leaf} is missing"


def check_scheme(
    module: str, tensors: Tensors, shape: tuple[int, int], schemes: Sequence[WeightScheme]
) -> None:
    """Check that the tensors of *module* match one of *schemes*, if there are any.

    Raises:
        CheckpointError: they do not.
    """
    faults = [next(scheme.faults(tensors, shape), None) for scheme in schemes]
    if faults and None not in faults:
        raise CheckpointError(
            f"{shown_name(module)} does not match config_groups in quantization_config: "
            f"{faults[0]}. The checkpoint is damaged, or its quantization_config does not belong "
            "to it."
        )
