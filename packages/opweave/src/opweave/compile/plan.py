"""The plan of one compilation: selection policy, options, passes, and the state that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import Graph

from opweave import ir, platforms
from opweave.compile import fingerprint
from opweave.compile.graph import IrCall, module_path, source_line, tensors_of
from opweave.compile.options import CompileOptions, PluginPassError, Priorities, logger
from opweave.compile.report import NodeReport, Refusal, Report
from opweave.compile.tracing import Tracer, signature
from opweave.ir import IrOp, Policy, Registry, Selection
from opweave.ir.errors import UnknownOpError, did_you_mean
from opweave.ir.explain import explained
from opweave.ir.op import least_bytes
from opweave.ir.priority import ALWAYS_LAST, NATIVE, Entries, merge, parse
from opweave.ir.selection import native_for
from opweave.platforms.resolution import PassReference, pass_references
from opweave.plugins import resolve_obj_by_qualname
from opweave.plugins.entry import ReferenceNameError

# Compiler passes from plugins. They run in the joint stage, after fusion and before lowering.
#
# A pass is a function ``(graph, context) -> None`` that changes an FX graph in-place and may
# append to ``context.notes`` for the report. The graph is functional, contains at least one IR
# op, and every node has a fake value in ``meta["val"]``. opweave computes the fake values of new
# nodes, removes unused nodes and sorts the graph afterwards. Every IR op is one node;
# :func:`opweave.compile.graph.ir_calls` returns them::
#
#     def scale_once(graph: Graph, context: Context) -> None:
#         for call in ir_calls(graph):
#             if call.op.name == "acme_scale" and call.argument("factor") == 1.0:
#                 replace(call, [call.argument("x")])
#                 context.notes.append(f"{call.node.name} is a no-op")
#
# A pass must depend only on the graph: the cache key of compiled code contains the source of the
# pass, but not other data that it reads.


PassFunction = Callable[[Graph, "Context"], None]


@dataclass(frozen=True)
class PluginPass:
    """A pass, its qualified name, and its plugin; "" if the program itself registered it."""

    name: str
    owner: str
    function: PassFunction

    @property
    def digest(self) -> str:
        """A digest of the name, owner and source."""
        return fingerprint.digest_of(
            [self.name, self.owner, fingerprint.of_function(self.function)]
        )


def plugin_passes() -> tuple[PluginPass, ...]:
    """Return the passes of plugins and of the platform, in execution order.

    Raises:
        PluginPassError: a pass does not exist, or is not a function of a graph and a context.
    """
    return tuple(map(_resolve, pass_references(platforms.current_platform)))


def _resolve(reference: PassReference) -> PluginPass:
    owner = "" if reference.owner is None else str(reference.owner)
    try:
        function = resolve_obj_by_qualname(reference.qualname)
    except ReferenceNameError as error:
        by = f" of plugin {owner}" if owner else ""
        raise PluginPassError(
            f"compiler pass {reference.qualname}{by} does not exist: {error} To compile without "
            "it, use the option plugin_passes=False."
        ) from error
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise PluginPassError(
            f"compiler pass {reference.qualname} is {function!r}; it should be a function "
            f"(graph, context) -> None ({error})."
        ) from error
    return PluginPass(reference.qualname, owner, function)


# The plan of one compilation: the selection policy of every op, the options and the passes.


@dataclass(frozen=True)
class Plan:
    """A snapshot of the policies and options when the compilation began.

    It is immutable, so the compiled graph always matches its cache key.
    """

    policies: Mapping[IrOp, Policy]
    options: CompileOptions
    passes: tuple[PluginPass, ...] = ()

    @classmethod
    def capture(
        cls, registries: Sequence[Registry], options: CompileOptions, size: int | None = None
    ) -> Plan:
        """Capture the current policies.

        Args:
            registries: the registries of the ops.
            options: backend options; their priorities and traits override the scope's.
            size: the number of tokens, which selects the compile range.

        Raises:
            IrError: a priority or a trait names something unknown.
            PluginPassError, ReferenceNameError: a plugin's compiler pass is invalid.
        """
        lists = [
            (f"option compile_ranges[{text!r}]", options.compile_ranges[text])
            for text, (low, high) in zip(options.compile_ranges, options.ranges, strict=True)
            if size is not None and low <= size <= high
        ]
        named = _named(registries, [*lists, ("option priorities", options.priorities)])
        policies: dict[IrOp, Policy] = {}
        with ir.require(*options.required_traits):
            for registry in registries:
                registry.ensure_ready()
                for op in registry.ops.values():
                    policies[op] = ir.policy_for(op, named.get(op.name, ()))
        return cls(policies, options, plugin_passes() if options.plugin_passes else ())

    def policy(self, op: IrOp, call_site: Entries = ()) -> Policy:
        """Return the policy for a call of *op*; *call_site* is the call's own priority."""
        base = self.policies.get(op) or ir.policy_for(op)
        op.check_providers(call_site)
        return base.preceded_by(call_site) if call_site else base

    def select(self, call: IrCall) -> Selection:
        """Select the implementation for a call in a graph.

        Calls under autocast use native, whose operators cast: a kernel could return another dtype.

        Raises:
            IrError: no implementation is admissible, or autocast needs native and the policy does
                not admit it.
        """
        selection = ir.select(call.op, call.fakes, self.policy(call.op, call.call_site))
        return native_for(selection) if call.autocast else selection

    @cached_property
    def digest(self) -> str:
        """A digest of everything except the graph that the compiled code depends on."""
        parts = [fingerprint.of_libraries(), fingerprint.of_binaries()]
        parts += [fingerprint.of_contributions(), repr(self.options)]
        parts += [compiler_pass.digest for compiler_pass in self.passes]
        for op, policy in sorted(self.policies.items(), key=lambda item: item[0].name):
            lists = [(limit, [*map(str, p.priority)]) for limit, p in policy.by_size()]
            entries = [*map(str, policy.priority)]
            parts += [op.registry.namespace, repr(entries), repr(sorted(policy.required))]
            parts += [repr(lists)] if policy.tuned else []
            parts.append(fingerprint.of_op(op))
        return fingerprint.digest_of(parts)


def _named(
    registries: Sequence[Registry], lists: Iterable[tuple[str, Priorities]]
) -> dict[str, Entries]:
    """Parse priority lists by op, strongest first, and check that every op exists."""
    entries: dict[str, list[Entries]] = {}
    ops = {name for registry in registries for name in registry.ops}
    for origin, priorities in lists:
        for name, providers in priorities.items():
            if name not in ops:
                raise UnknownOpError(f"{origin}: unknown op {name!r}. {did_you_mean(name, ops)}")
            entries.setdefault(name, []).append(parse(providers, f"{origin}[{name!r}]"))
    return {name: _without_native_last(merge(of_op)) for name, of_op in entries.items()}


def _without_native_last(entries: Entries) -> Entries:
    """Remove the native entry that :func:`merge` appended: weaker lists follow before native."""
    return tuple(e for e in entries if not (e.provider == NATIVE and e.origin == ALWAYS_LAST))


# The state that the passes of one compilation share.


@dataclass
class Context:
    """The plan, the report and the traces of one compilation.

    Attributes:
        plan: the selection policies and options.
        report: collects the decisions of the passes.
        tracer: caches traces of implementations.
        joint_key: a second cache key of the report, computed from the graph after the joint stage,
            which does not contain names from the user's program.
        fused_from: names of the nodes that each composite replaced, by the composite's node name.
        recognized_from: names of the operators that each recognized op replaced, by its node name.
        notes: messages of the running pass for the report.
    """

    plan: Plan
    report: Report = field(default_factory=Report)
    tracer: Tracer = field(default_factory=Tracer)
    joint_key: str = ""
    fused_from: dict[str, list[str]] = field(default_factory=dict)
    recognized_from: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _texts: dict[Any, str] = field(default_factory=dict)  # described arguments, by signature

    def describe(self, call: IrCall, selection: Selection, stage: str) -> NodeReport:
        """Add the selection for *call* to the report, and return the new entry."""
        described = NodeReport(
            node=call.node.name,
            op=call.op.name,
            source=source_line(call.node),
            call=self._arguments(call, selection),
            chosen=selection.provider,
            rejected=[Refusal(r.provider, r.reason, r.origin) for r in selection.rejected],
            stage=stage,
            fused_from=self.fused_from.get(call.node.name, []),
            recognized_from=self.recognized_from.get(call.node.name, []),
            module=module_path(call.node),
            bytes=least_bytes(call.op, call.fakes, tensors_of(call.node)),
        )
        self.report.nodes.append(described)
        logger.debug("%s [%s] → %s (%s)", call.op.name, described.node, described.chosen, stage)
        for refusal in described.rejected:
            logger.debug("    not %s: %s [%s]", refusal.provider, refusal.reason, refusal.origin)
        return described

    def _arguments(self, call: IrCall, selection: Selection) -> str:
        """Return the arguments of *call* as text, the same text for the same signature."""
        key = call.op, tuple(map(signature, call.fakes))
        if key not in self._texts:
            self._texts[key] = explained(selection, call.fakes).call
        return self._texts[key]
