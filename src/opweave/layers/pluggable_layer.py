"""Layers that another package can replace as a whole."""

from __future__ import annotations

from opweave.layers.replaceable import Replaceable


class PluggableLayer(Replaceable):
    """A layer with its own parameters and submodules that another package can replace.

    It has no switch and no method per platform: what it computes, it computes through ops and
    other layers, which have. Its registry is that of :class:`CustomOp`.

    Example::

        @PluggableLayer.register("row_parallel_linear")
        class RowParallelLinear(PluggableLayer): ...

        @RowParallelLinear.register_oot      # in another package
        class MyRowParallelLinear(RowParallelLinear): ...
    """
