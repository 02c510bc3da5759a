"""The state that the passes of one compilation share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opweave.compile.log import logger
from opweave.compile.nodes import IrCall, module_path, source_line, tensors_of
from opweave.compile.plan import Plan
from opweave.compile.report import NodeReport, Refusal, Report
from opweave.compile.tracing import Tracer, signature
from opweave.ir import Selection
from opweave.ir.explain import explained
from opweave.ir.traffic import least_bytes


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
