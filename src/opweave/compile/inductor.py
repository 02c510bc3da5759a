"""The two places where Inductor lets us at its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Graph, GraphModule

from opweave.compile import compat, pipeline, store
from opweave.compile.context import Context
from opweave.compile.inplace import copy_through_views
from opweave.compile.pipeline import Stage

HOOKS = {
    "joint_custom_pre_pass": Stage.JOINT,
    "post_grad_custom_post_pass": Stage.POST_GRAD,
}


class StagePass(compat.CustomGraphPass):
    """The passes of one stage, and those that the user configured for the same place.

    Its identifier, which goes into the keys of Inductor's and AOTAutograd's caches, says everything
    that the result depends on besides the graph. It holds nothing that a graph says.
    """

    def __init__(self, stage: Stage, context: Context, others: Sequence[Any]) -> None:
        self._stage, self._context, self._others = stage, context, list(others)

    def __call__(self, graph: Graph) -> None:
        pipeline.run(self._stage, graph, self._context)
        for other in self._others:
            other(graph)
        if self._stage is Stage.POST_GRAD and self._context.plan.options.codegen:
            copy_through_views(graph)
        if self._stage is Stage.JOINT:  # the whole graph comes last, after those inside of it
            whole = cast("GraphModule", graph.owning_module)
            self._context.joint_key = store.key_of(whole, self._context.plan)

    def uuid(self) -> Any | None:
        others = [other.uuid() if hasattr(other, "uuid") else None for other in self._others]
        if None in others:
            return None  # Inductor then leaves the caches out, as it does without us
        return (self._stage.value, self._context.plan.digest, tuple(map(repr, others)))


def hooks(context: Context) -> dict[str, Any]:
    """Return the Inductor options that put the passes in place."""
    return {
        name: StagePass(stage, context, compat.configured_passes(name))
        for name, stage in HOOKS.items()
    }
