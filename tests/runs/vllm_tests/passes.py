"""Stand-ins for vLLM's compiler passes that run opweave's on the same graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule, Node

from opweave.compile import pipeline
from opweave.compile.backend import registries_of
from opweave.compile.compat import OpOverload
from opweave.compile.graph import GraphInfo
from opweave.compile.options import CompileOptions
from opweave.compile.passes import clean_up, eliminate_noops
from opweave.compile.pipeline import Stage
from opweave.compile.plan import Context, Plan
from opweave.compile.tracing import written_results
from opweave.ir import current_registry

PASSES = "vllm.compilation.passes"


def context_of(graph: Graph) -> Context:
    module = graph.owning_module
    registries = [current_registry()] if module is None else registries_of(module)
    return Context(Plan.capture(registries, CompileOptions()))


class Range(NamedTuple):
    start: int
    end: int


class Pass:
    """One of opweave's passes; vLLM's classes take the configuration."""

    def __init__(self, config: object) -> None:
        pass

    def __call__(self, graph: Graph) -> None:
        self.change(graph, context_of(graph))
        graph.lint()

    def change(self, graph: Graph, context: Context) -> None:
        raise NotImplementedError


class InductorPass:
    """Base class of the passes that tests define."""

    @staticmethod
    def hash_source(*sources: object) -> str:
        return repr(sources)


class EliminateNoops(Pass):
    """Removes duplicate splits, too, for which vLLM has a pass of its own."""

    def change(self, graph: Graph, context: Context) -> None:
        eliminate_noops(GraphInfo(graph), context)
        clean_up(GraphInfo(graph), context)


class Lower(Pass):
    def change(self, graph: Graph, context: Context) -> None:
        for stage in (Stage.JOINT, Stage.POST_GRAD):
            pipeline.run(stage, graph, context)
        self.selected_impls = context.report.selected_impls


class Reuse(Pass):
    """The stage that decides which memory kernels reuse; vLLM removes clones instead."""

    def change(self, graph: Graph, context: Context) -> None:
        pipeline.run(Stage.POST_GRAD, graph, context)


def user_writes_to_node(user: Node, node: Node) -> bool:
    """Whether *user* writes to the memory of *node*, as opweave's passes see it."""
    target = user.target
    return isinstance(target, OpOverload) and node in written_results(user, target).values()


def find_op_nodes(op: Any, graph: Graph) -> Iterator[Node]:
    return iter(graph.find_nodes(op="call_function", target=op))


_context: list[SimpleNamespace] = []


@contextmanager
def pass_context(compile_range: object) -> Iterator[None]:
    _context.append(SimpleNamespace(compile_range=compile_range, donated_input_ids=set()))
    try:
        yield
    finally:
        _context.pop()


class TestBackend:
    """Compiles with Inductor, and runs the given passes after Inductor's."""

    __test__ = False

    def __init__(self, *passes: Callable[[Graph], None]) -> None:
        self.passes = passes
        self.inductor_config: dict[str, Any] = {
            "force_disable_caches": True,
            "post_grad_custom_post_pass": self.run_passes,
        }

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        pipeline.run(Stage.DYNAMO, module.graph, context_of(module.graph))
        module.recompile()
        return compile_fx(module, inputs, config_patches=self.inductor_config)

    def run_passes(self, graph: Graph) -> None:
        self.targets_before = [node.target for node in graph.nodes]
        for each in self.passes:
            each(graph)
        self.final_graph = graph
        self.targets = [node.target for node in graph.nodes]

    def op_count(self, op: Any, before: bool = False) -> int:
        return (self.targets_before if before else self.targets).count(op)


STAND_INS: dict[str, Any] = {
    f"{PASSES}.inductor_pass.CallableInductorPass": lambda function, uuid=None: function,
    f"{PASSES}.inductor_pass.InductorPass": InductorPass,
    f"{PASSES}.inductor_pass.pass_context": pass_context,
    f"{PASSES}.inductor_pass.get_pass_context": lambda: _context[-1],
    f"{PASSES}.fx_utils.find_op_nodes": find_op_nodes,
    f"{PASSES}.ir.clone_elimination.UnsafeCloneEliminationPass": Reuse,
    f"{PASSES}.ir.clone_elimination.user_writes_to_node": user_writes_to_node,
    f"{PASSES}.ir.lowering_pass.VllmIRLoweringPass": Lower,
    f"{PASSES}.utility.noop_elimination.NoOpEliminationPass": EliminateNoops,
    f"{PASSES}.utility.scatter_split_replace.ScatterSplitReplacementPass": EliminateNoops,
    f"{PASSES}.utility.split_coalescing.SplitCoalescingPass": EliminateNoops,
    "vllm.config.utils.Range": Range,
}
