"""What happened to a graph while it was compiled, as plain data."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Self

WITH_GRADIENTS = "with gradients"  # the stage of calls that autograd records


@dataclass
class Refusal:
    """A provider that was passed over.

    Attributes:
        provider: its name.
        reason: why.
        origin: who put it into the priority list.
    """

    provider: str
    reason: str
    origin: str


@dataclass
class Reuse:
    """Whether an in-place kernel got an activation's own memory, and if not, why.

    It is then *copied*, unless the kernel has a functional form, which leaves it alone.
    """

    activation: str
    reused: bool
    reason: str
    copied: bool

    @property
    def verb(self) -> str:
        """What the kernel does with the activation."""
        return "reuses" if self.reused else "copies" if self.copied else "leaves"


@dataclass
class NodeReport:
    """One call of an op.

    Attributes:
        node: its name in the graph.
        op: the op.
        source: the line of the user's source.
        call: the arguments: dtypes, shapes, values.
        chosen: the provider that was selected.
        rejected: those in front of it, and why not.
        stage: which pass lowered it.
        fused_from: the nodes that it replaced, if it is a composite that fusion formed.
        reuse: what became of the activations of an in-place kernel.
        module: the path of the module that makes the call, such as ``model.layers.0.mlp``.
        bytes: of its arguments and results; None where the call reads a part of a table.
    """

    node: str
    op: str
    source: str
    call: str
    chosen: str
    rejected: list[Refusal]
    stage: str
    fused_from: list[str] = field(default_factory=list)
    reuse: list[Reuse] = field(default_factory=list)
    module: str = ""
    bytes: int | None = None

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What was decided, equal for calls that are treated alike."""
        rejected, reuse = tuple(map(astuple, self.rejected)), tuple(map(astuple, self.reuse))
        return (self.op, self.chosen, self.stage, bool(self.fused_from), rejected, reuse)

    @property
    def module_pattern(self) -> str:
        """The module's path with ``*`` for indices: ``model.layers.*.mlp``."""
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", self.module)


@dataclass
class FusionReport:
    """One place where a composite was found, or nearly.

    Attributes:
        composite: the op.
        node: where it is in the graph.
        outcome: ``fused`` or ``rejected``.
        reason: why it was not formed.
    """

    composite: str
    node: str
    outcome: str
    reason: str


@dataclass
class PassReport:
    """One run of one pass.

    Attributes:
        name: of the pass.
        stage: in which it ran.
        seconds: how long it took.
        before: the graph before it, as Python that runs; empty if nothing changed.
        after: the graph after it, likewise.
        notes: what it said.
        owner: the plugin that brings it; empty if none does.
    """

    name: str
    stage: str
    seconds: float
    before: str = ""
    after: str = ""
    notes: list[str] = field(default_factory=list)
    owner: str = ""

    @property
    def title(self) -> str:
        """Its name, and the plugin that brings it, if one does."""
        return f"{self.name}, of {self.owner}" if self.owner else self.name

    @property
    def changed(self) -> bool:
        """Whether it changed the graph."""
        return self.before != self.after


@dataclass
class Report:
    """Everything that was decided about one graph.

    Attributes:
        key: what the report is filed under, next to the compiled artifact.
        from_cache: the artifact was compiled earlier, and this is the report of that compilation.
        complete: the passes have run, or their report was found.
        seconds: how long the passes took.
        traces: how many implementations were made into graphs.
        nodes: each call of an op.
        fusions: each place where a composite was found, or nearly.
        passes: each run of a pass, in order.
        collectives: how many the graph has, by name.
    """

    key: str = ""
    from_cache: bool = False
    complete: bool = False
    seconds: float = 0.0
    traces: int = 0
    nodes: list[NodeReport] = field(default_factory=list)
    fusions: list[FusionReport] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def remarks(self) -> list[str]:
        """What a reader should know about the graph as a whole, a sentence each."""
        found = []
        if self.complete and not self.nodes:
            found.append(
                "0 opweave ops in this graph: it calls none, so Inductor compiles it alone. Write "
                "the model with opweave.ir.ops or opweave.layers"
            )
        differentiated = sum(node.stage == WITH_GRADIENTS for node in self.nodes)
        if differentiated:
            found.append(
                f"{differentiated} of {len(self.nodes)} calls run differentiable implementations, "
                "usually native, because gradients are on: for inference, compile under "
                "torch.no_grad() or torch.inference_mode()"
            )
        return found

    @property
    def selected_impls(self) -> dict[str, dict[str, str]]:
        """The provider of each node by op: ``{"rms_norm": {"rms_norm_default": "native"}}``."""
        result: dict[str, dict[str, str]] = {}
        for node in self.nodes:
            result.setdefault(node.op, {})[node.node] = node.chosen
        return result

    @property
    def providers(self) -> dict[str, int]:
        """Calls by provider, the most frequent first."""
        return dict(Counter(node.chosen for node in self.nodes).most_common())

    @property
    def reuses(self) -> list[Reuse]:
        """What became of every activation that an in-place kernel was given."""
        return [reuse for node in self.nodes for reuse in node.reuse]

    @property
    def copies(self) -> int:
        """How many activations were copied."""
        return sum(reuse.copied for reuse in self.reuses)

    @property
    def fused(self) -> list[FusionReport]:
        """The fusions that were formed."""
        return [fusion for fusion in self.fusions if fusion.outcome == "fused"]

    @property
    def near_misses(self) -> list[FusionReport]:
        """The fusions that were not formed, though more than one of their parts was there."""
        return [fusion for fusion in self.fusions if fusion.outcome != "fused"]

    def outcomes(self) -> list[tuple[NodeReport, int]]:
        """Return one call for each distinct outcome, with the number of calls like it."""
        alike: dict[Any, list[NodeReport]] = {}
        for node in self.nodes:
            alike.setdefault(node.outcome, []).append(node)
        return [(nodes[0], len(nodes)) for nodes in alike.values()]

    def layer_groups(self) -> list[list[NodeReport]]:
        """Return the calls, those grouped that differ in the index of their layer only."""
        groups: dict[Any, list[NodeReport]] = {}
        for node in self.nodes:
            key = (node.outcome, node.source, node.call, node.module_pattern)
            groups.setdefault(key, []).append(node)
        return list(groups.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {**asdict(self), "selected_impls": self.selected_impls}

    def to_json(self) -> str:
        """Return the same as JSON, for :meth:`from_json`."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote (ValueError, KeyError, TypeError if it is not that)."""
        data = json.loads(text)
        del data["selected_impls"]  # of the nodes
        nodes = [
            NodeReport(
                **{
                    **node,
                    "rejected": [Refusal(**r) for r in node["rejected"]],
                    "reuse": [Reuse(**r) for r in node["reuse"]],
                }
            )
            for node in data.pop("nodes")
        ]
        fusions = [FusionReport(**fusion) for fusion in data.pop("fusions")]
        passes = [PassReport(**record) for record in data.pop("passes")]
        return cls(nodes=nodes, fusions=fusions, passes=passes, **data)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.from_cache and not self.complete:
            yield "compiled earlier, its report is missing"
            return
        where = "from the cache" if self.from_cache else f"{self.seconds * 1e3:.0f} ms in passes"
        yield f"{len(self.nodes)} calls of ops, {self.traces} traces, {where}"
        yield from self.remarks
        for node in self.nodes:
            fused = f"  (fused from {', '.join(node.fused_from)})" if node.fused_from else ""
            yield f"{node.op} [{node.node}] → {node.chosen}{fused}"
            yield f"    {node.source}"
            for refusal in node.rejected:
                yield f"    ✗ {refusal.provider}: {refusal.reason}  [{refusal.origin}]"
            for reuse in node.reuse:
                reason = f": {reuse.reason}" if reuse.reason else ""
                yield f"    {reuse.verb} {reuse.activation}{reason}"
        for fusion in self.near_misses:
            yield f"not fused: {fusion.composite} at {fusion.node}: {fusion.reason}"
