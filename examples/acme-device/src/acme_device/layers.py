"""Layers of opweave that acme replaces. A model asks for ``RMSNorm`` and gets ``AcmeRMSNorm``."""

from __future__ import annotations

from torch import Tensor, nn

from acme_device.ops import acme_tiled_linear, tile
from opweave.layers import RMSNorm, RowParallelLinear
from opweave.layers.linear_methods import UnquantizedLinearMethod


@RMSNorm.register_oot
class AcmeRMSNorm(RMSNorm):
    """A ``CustomOp``: ``forward_oot`` is what runs on a platform from outside.

    It calls the ops, not the kernels, so that the choice of a kernel stays the user's.
    """

    def forward_oot(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self.forward_cuda(x, residual)


@RowParallelLinear.register_oot
class AcmeRowParallelLinear(RowParallelLinear):
    """A ``PluggableLayer`` with a layout of its own: the device multiplies by tiles of 16 outputs.

    Weights are loaded as for any layer; when they are complete, the platform calls :meth:`tile`.
    """

    def tile(self) -> None:
        """Lay the weight out in tiles, unless it is quantized, or done already."""
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.register_buffer("tiles", tile(self.weight.data), persistent=False)
            del self.weight
            self.quant_method = TiledLinearMethod()


class TiledLinearMethod(UnquantizedLinearMethod):
    """Multiplies by a weight in tiles."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = acme_tiled_linear(x, layer.tiles, layer.output_size, bias)
        return output
