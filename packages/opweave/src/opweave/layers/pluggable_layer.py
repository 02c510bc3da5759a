"""Layers that another package can replace as a whole."""

from __future__ import annotations

from opweave.layers.replaceable import Replaceable


class PluggableLayer(Replaceable):
    """A layer with its own parameters and submodules that another package can replace.

    Unlike a :class:`CustomOp`, it cannot be disabled and has no method per platform: it consists of
    ops and other layers, which select kernels. Both kinds share one registry.

    Example::

        @PluggableLayer.register("row_parallel_linear")
        class RowParallelLinear(PluggableLayer): ...

        @RowParallelLinear.register_oot      # in another package
        class MyRowParallelLinear(RowParallelLinear): ...
    """
