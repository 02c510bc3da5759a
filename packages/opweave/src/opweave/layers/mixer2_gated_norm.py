"""The gated norm of Mamba-2's mixer, whose groups may span several ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from opweave import ir
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError, WeightLoadError
from opweave.layers.parallel import current_tensor_parallel


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
        size = self.per_rank_hidden_size
        if loaded_weight.shape == (self.full_hidden_size,):
            loaded_weight = loaded_weight.narrow(0, self.parallel.rank * size, size)
        if loaded_weight.shape != param.shape:
            raise WeightLoadError(
                f"mixer2_gated_rms_norm: the weight has shape {tuple(loaded_weight.shape)}; it "
                f"should be ({self.full_hidden_size},), or this rank's part, ({size},)."
            )
        param.data.copy_(loaded_weight)

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
            whole = self.parallel.all_gather(y)
            normed = norm(whole, None, None, self.variance_epsilon, self.group_size)
            y = normed.narrow(
                -1, self.parallel.rank * self.per_rank_hidden_size, self.per_rank_hidden_size
            )
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"full_hidden_size={self.full_hidden_size}, n_groups={self.n_groups}, "
            f"use_rms_norm={self.use_rms_norm}, eps={self.variance_epsilon}"
        )


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) * functional.silu(gate.to(dtype))
