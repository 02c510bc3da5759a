"""Normalization as layers: root-mean-square, gated, and the gated norm of Mamba-2's mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from opweave import ir
from opweave.ir.ops.norm import GATE_ACTIVATIONS
from opweave.layers.custom_op import CustomOp
from opweave.layers.parallel import current_tensor_parallel, fill
from opweave.layers.registry import LayerArgumentError

# Root-mean-square normalization as layers.


class _ResidualNorm(CustomOp):
    """An RMS norm, which may be given a residual.

    Attributes:
        donates: whether the platform's methods donate *x* and the residual.
    """

    donates: ClassVar[bool]

    def _options(self) -> tuple[Tensor | None, float, int | None]:
        """Return the last arguments of the ops: the factor, epsilon and the variance's size."""
        raise NotImplementedError

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize *x*, ``(..., hidden_size)``, or ``x + residual``.

        Returns:
            The result in the shape and dtype of *x*; with a residual, the result and the sum.
        """
        if residual is None:
            normed: Tensor = ir.ops.rms_norm.native(x, *self._options())
            return normed
        both: tuple[Tensor, Tensor]
        both = ir.ops.fused_add_rms_norm.native(x, residual, *self._options())
        return both

    def forward_cuda(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As :meth:`forward_native`, but some norms donate *x* and *residual*, if there is one.

        Do not use donated tensors afterwards.
        """
        if residual is None:
            normed: Tensor = ir.ops.rms_norm(x, *self._options())
            return normed
        op = ir.ops.fused_add_rms_norm
        fused: Callable[..., tuple[Tensor, Tensor]] = op.maybe_inplace if self.donates else op
        return fused(x, residual, *self._options())

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda


@CustomOp.register("rms_norm")
class RMSNorm(_ResidualNorm):
    """Normalizes the last dimension: ``ir.ops.rms_norm``, ``ir.ops.fused_add_rms_norm``.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.
        var_hidden_size: compute the mean square over the first *var_hidden_size* elements only.
        has_weight: whether there is a learned weight; otherwise ``weight`` is ones.
        dtype: dtype of the weight; by default, torch's default dtype.

    Raises:
        LayerArgumentError: *var_hidden_size* is not between 1 and *hidden_size*.

    Source: Zhang and Sennrich, arXiv:1910.07467. With a residual, both tensors are donated.
    """

    donates = True
    weight: Tensor

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if var_hidden_size is not None and not 0 < var_hidden_size <= hidden_size:
            raise LayerArgumentError(
                f"var_hidden_size={var_hidden_size} is not between 1 and hidden_size={hidden_size}."
            )
        self.hidden_size, self.variance_epsilon, self.has_weight = hidden_size, eps, has_weight
        self.variance_size = None if var_hidden_size == hidden_size else var_hidden_size
        ones = torch.ones(hidden_size, dtype=dtype)
        self.weight = nn.Parameter(ones) if has_weight else ones

    def _options(self) -> tuple[Tensor | None, float, int | None]:
        weight = self.weight if self.has_weight else None
        return weight, self.variance_epsilon, self.variance_size

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(_ResidualNorm):
    """RMS norm with the factor ``1 + weight``, in float32: ``ir.ops.rms_norm``.

    Nothing is donated.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.

    Source: Gemma, arXiv:2403.08295.
    """

    donates = False

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def _options(self) -> tuple[Tensor | None, float, int | None]:
        factor = 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return factor, self.variance_epsilon, None

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.numel()}, eps={self.variance_epsilon}"


# Root-mean-square norms with a gate, as layers.


@CustomOp.register("rms_norm_gated")
class RMSNormGated(CustomOp):
    """``norm(x * act(z)) * weight``, or ``norm(x) * weight * act(z)``: ``ir.ops.rms_norm_gated``.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.
        group_size: normalize groups of this many elements separately; None for one group.
        norm_before_gate: normalize before the gate is applied, instead of after.
        device, dtype: device and dtype of the weight.
        activation: activation of the gate: ``"silu"`` (or ``"swish"``, its other name), or
            ``"sigmoid"``.

    Raises:
        LayerArgumentError: *group_size* does not divide *hidden_size*, or *activation* is
            unknown.

    Source: Mamba-2, arXiv:2405.21060; with *norm_before_gate*, Gated DeltaNet, arXiv:2412.06464.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
    ) -> None:
        super().__init__()
        if activation not in GATE_ACTIVATIONS:
            raise LayerArgumentError(
                f"activation={activation!r} is not one of {', '.join(GATE_ACTIVATIONS)}."
            )
        if group_size is not None and (group_size < 1 or hidden_size % group_size):
            raise LayerArgumentError(
                f"group_size={group_size} does not divide hidden_size={hidden_size}."
            )
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.eps, self.group_size = eps, group_size
        self.norm_before_gate, self.activation = norm_before_gate, activation

    def forward_native(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize *x*, ``(..., hidden_size)``, gated by *z* of the same shape if there is one.

        Returns:
            Shape and dtype of *x*.
        """
        normed: Tensor = ir.ops.rms_norm_gated.native(x, self.weight, z, *self._options())
        return normed

    def forward_cuda(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        normed: Tensor = ir.ops.rms_norm_gated(x, self.weight, z, *self._options())
        return normed

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _options(self) -> tuple[float, int | None, bool, str]:
        return self.eps, self.group_size, self.norm_before_gate, self.activation

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.weight.numel()}, eps={self.eps}, group_size={self.group_size}, "
            f"norm_before_gate={self.norm_before_gate}, activation={self.activation!r}"
        )


# The gated norm of Mamba-2's mixer, whose groups may span several ranks.


@CustomOp.register("mixer2_gated_rms_norm")
class Mixer2RMSNormGated(CustomOp):
    """``norm(x * silu(gate)) * weight``, by groups of neighbors: ``ir.ops.rms_norm_gated``.

    The normalized elements are rounded to the dtype of *x* before the product with the weight.
    Elements and weight are sharded over the ranks. If no group spans several ranks, nothing is
    exchanged; a single group exchanges its sum of squares; otherwise the elements are gathered.

    Args:
        full_hidden_size: the number of elements on all ranks.
        full_n_groups: the number of groups on all ranks.
        use_rms_norm: False: only the gate, and there is no weight.
        eps: added to the mean square.

    Raises:
        ShardingError: the number of ranks does not divide *full_hidden_size*.
        LayerArgumentError: *full_n_groups* does not divide *full_hidden_size*.

    Source: Mamba-2, Dao and Gu, arXiv:2405.21060.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        full_hidden_size: int,
        full_n_groups: int,
        use_rms_norm: bool = True,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.parallel = current_tensor_parallel()
        size = self.parallel.divide(full_hidden_size, "full_hidden_size")
        if full_n_groups < 1 or full_hidden_size % full_n_groups:
            raise LayerArgumentError(
                f"full_n_groups={full_n_groups} does not divide full_hidden_size="
                f"{full_hidden_size}."
            )
        self.full_hidden_size, self.per_rank_hidden_size = full_hidden_size, size
        self.n_groups, self.group_size = full_n_groups, full_hidden_size // full_n_groups
        self.use_rms_norm, self.variance_epsilon = use_rms_norm, eps
        self.weight = None
        if use_rms_norm:
            self.weight = nn.Parameter(torch.ones(size))
            self.weight.weight_loader = self.load_weight  # type: ignore[attr-defined]

    def load_weight(self, param: Tensor, loaded_weight: Tensor) -> None:
        """Fill *param* from the whole weight, or from this rank's shard.

        Raises:
            WeightLoadError: the tensor has another shape.
        """
        label = "mixer2_gated_rms_norm: weight"
        fill(param.data, loaded_weight, label, 0, self.parallel.rank, self.parallel.size)

    def forward_native(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize *x*, ``(..., full_hidden_size / ranks)``, gated by *gate* of the same shape.

        Returns:
            Shape and dtype of *x*.
        """
        return self._run(x, gate, ir.ops.rms_norm_gated.native)

    def forward_cuda(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._run(x, gate, ir.ops.rms_norm_gated)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _run(self, x: Tensor, gate: Tensor, norm: Callable[..., Tensor]) -> Tensor:
        if self.weight is None:
            return _gated(x, gate).to(x.dtype)
        return (self.weight * self._normed(x, gate, norm)).to(x.dtype)

    def _normed(self, x: Tensor, gate: Tensor, norm: Callable[..., Tensor]) -> Tensor:
        ranks = self.parallel.size
        if self.n_groups % ranks == 0:
            return norm(x, None, gate, self.variance_epsilon, self.group_size)
        y = _gated(x, gate)
        if self.n_groups == 1:
            squares = self.parallel.all_reduce(y.pow(2).sum(dim=-1, keepdim=True))
            y = y * torch.rsqrt(squares / self.full_hidden_size + self.variance_epsilon)
        else:
            whole, size = self.parallel.all_gather(y), self.per_rank_hidden_size
            normed = norm(whole, None, None, self.variance_epsilon, self.group_size)
            y = normed.narrow(-1, self.parallel.rank * size, size)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"full_hidden_size={self.full_hidden_size}, n_groups={self.n_groups}, "
            f"use_rms_norm={self.use_rms_norm}, eps={self.variance_epsilon}"
        )


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) * functional.silu(gate.to(dtype))
