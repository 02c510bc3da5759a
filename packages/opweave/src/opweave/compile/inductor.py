"""Custom Inductor passes that run the joint and post-grad stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Graph, GraphModule

from opweave.compile import compat, pipeline, report_cache
from opweave.compile.context import Context
from opweave.compile.inplace import copy_through_views
from opweave.compile.pipeline import Stage

HOOKS = {
    "joint_custom_pre_pass": Stage.JOINT,
    "post_grad_custom_post_pass": Stage.POST_GRAD,
}


class StagePass(compat.CustomGraphPass):
    """The passes of one stage, followed by the user's own passes for the same hook.

    Its UUID, a part of the cache keys of Inductor and AOTAutograd, covers everything except the
    graph that the result depends on.
    """

    def __init__(self, stage: Stage, context: Context, others: Sequence[Any]) -> None:
        self._stage, self._context, self._others = stage, context, list(others)

    def __call__(self, graph: Graph) -> None:
        pipeline.run(self._stage, graph, self._context)
        for other in self._others:
            other(graph)
        if self._stage is Stage.POST_GRAD and self._context.plan.options.codegen:
            copy_through_views(graph)
        if self._stage is Stage.JOINT:  # Inductor calls this for subgraphs first
            whole = cast("GraphModule", graph.owning_module)
            self._context.joint_key = report_cache.key_of(whole, self._context.plan)

    def uuid(self) -> Any | None:
        others = [other.uuid() if hasattr(other, "uuid") else None for other in self._others]
        if None in others:
            return None  # a pass without a UUID disables Inductor's caches, as without opweave
        return (self._stage.value, self._context.plan.digest, tuple(map(repr, others)))


def hooks(context: Context) -> dict[str, Any]:
    """Return the Inductor options that install the passes."""
    return {
        name: StagePass(stage, context, compat.configured_passes(name))
        for name, stage in HOOKS.items()
    }
