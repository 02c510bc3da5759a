"""The compilation report of a graph, as plain data.

Near misses come from :mod:`opweave.compile.fuse`, their reasons from :mod:`opweave.compile.match`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Self, TypeVar

from opweave.ir.explain import text_table

_Item = TypeVar("_Item")

WITH_GRADIENTS = "with gradients"  # the stage of differentiated calls


@dataclass
class Refusal:
    """A provider that was rejected.

    Attributes:
        provider: the name of the provider.
        reason: why it was rejected.
        origin: the setting that put it into the priority list.
    """

    provider: str
    reason: str
    origin: str


@dataclass
class Reuse:
    """Whether an in-place kernel overwrites an activation, and if not, why.

    If not, the activation is *copied*, unless the kernel's functional form runs instead.
    """

    activation: str
    reused: bool
    reason: str
    copied: bool

    @property
    def verb(self) -> str:
        """The effect on the activation: the kernel "reuses", "copies" or "leaves" it."""
        return "reuses" if self.reused else "copies" if self.copied else "leaves"


@dataclass
class NodeReport:
    """One call of an op.

    Attributes:
        node: the name of the node.
        op: the name of the op.
        source: the line of the user's source code.
        call: the arguments: dtypes, shapes, values.
        chosen: the selected provider.
        rejected: the providers with a higher priority, and why they were rejected.
        stage: the pass that lowered it.
        fused_from: the names of the nodes that it replaced, if fusion formed it.
        reuse: the memory decision for each activation of an in-place kernel.
        module: the path of the calling module, such as ``model.layers.0.mlp``.
        bytes: the size of its arguments and results; None if it reads only a part of a table.
        recognized_from: the names of the PyTorch operators that it replaced, if recognition formed
            it.
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
    recognized_from: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """A key for the decisions; equal for calls that were treated alike."""
        rejected, reuse = tuple(map(astuple, self.rejected)), tuple(map(astuple, self.reuse))
        origin = bool(self.fused_from), bool(self.recognized_from)
        return (self.op, self.chosen, self.stage, *origin, rejected, reuse)

    @property
    def module_pattern(self) -> str:
        """The module path with ``*`` for indices: ``model.layers.*.mlp``."""
        return re.sub(r"\b\d+\b", "*", self.module)


@dataclass
class MatchReport:
    """An op that fusion or recognition formed, or a near miss.

    Attributes:
        op: the name of the op.
        node: the name of the node.
        outcome: ``fused``, ``recognized`` or ``rejected``.
        reason: the replaced nodes, or why the match was rejected.
        source: the line of the user's source code.
    """

    op: str
    node: str
    outcome: str
    reason: str
    source: str = ""


def alike(matches: Iterable[MatchReport]) -> list[list[MatchReport]]:
    """Return the matches, grouped by outcome, op and the reason of a rejection.

    The numbers of nodes, such as that of ``add_12``, do not distinguish reasons.
    """

    def key(match: MatchReport) -> tuple[str, ...]:
        reason = re.sub(r"(?<=[a-z])_\d+\b", "", match.reason)
        return match.outcome, match.op, reason if match.outcome == "rejected" else ""

    return _grouped(sorted(matches, key=lambda match: match.outcome == "rejected"), key)


def _grouped(items: Iterable[_Item], key: Callable[[_Item], Any]) -> list[list[_Item]]:
    """Return the items with equal keys together, in order of the first of them."""
    groups: dict[Any, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


@dataclass
class PassReport:
    """One run of one pass.

    Attributes:
        name: the name of the pass.
        stage: the stage of the pass.
        seconds: the duration.
        before: the graph before the pass, as Python code; empty if the pass did not change it.
        after: the graph after the pass, likewise.
        notes: messages of the pass.
        owner: the plugin that registered it; empty for a built-in pass.
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
        """The name of the pass, and its plugin, if any."""
        return f"{self.name}, of {self.owner}" if self.owner else self.name

    @property
    def changed(self) -> bool:
        """Whether the pass changed the graph."""
        return self.before != self.after


@dataclass
class Report:
    """All decisions about one graph.

    Attributes:
        key: the cache key of the report.
        from_cache: whether the artifact came from the cache; this is then the report of the
            original compilation.
        complete: whether the passes have run, or the report of their run was found in the cache.
        is_differentiated: whether autograd records the graph, in which no ops are recognized then.
        seconds: the total duration of the passes.
        traces: the number of traced implementations.
        nodes: the calls of ops.
        fusions: the fusions and near misses.
        recognitions: the recognized ops and near misses.
        passes: the passes, in order.
        collectives: the number of collectives in the graph, by name.
    """

    key: str = ""
    from_cache: bool = False
    complete: bool = False
    is_differentiated: bool = False
    seconds: float = 0.0
    traces: int = 0
    nodes: list[NodeReport] = field(default_factory=list)
    fusions: list[MatchReport] = field(default_factory=list)
    recognitions: list[MatchReport] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def remarks(self) -> list[str]:
        """Remarks about the graph as a whole, one sentence each."""
        remarks = []
        if self.complete and not self.nodes:
            inference = (
                "compile under torch.no_grad(), because ops are recognized in inference only, or "
            )
            remarks.append(
                "0 opweave ops in this graph: it calls none and none was recognized, so Inductor "
                "compiles it alone. To use opweave's kernels, "
                f"{inference if self.is_differentiated else ''}"
                "write the model with opweave.ir.ops or opweave.layers"
            )
        differentiated = sum(node.stage == WITH_GRADIENTS for node in self.nodes)
        if differentiated:
            remarks.append(
                f"{differentiated} of {len(self.nodes)} calls run differentiable implementations, "
                "usually native, because gradients are on: for inference, compile under "
                "torch.no_grad() or torch.inference_mode()"
            )
        return remarks

    @property
    def selected_impls(self) -> dict[str, dict[str, str]]:
        """The provider of each node by op: ``{"rms_norm": {"rms_norm_default": "native"}}``."""
        result: dict[str, dict[str, str]] = {}
        for node in self.nodes:
            result.setdefault(node.op, {})[node.node] = node.chosen
        return result

    @property
    def providers(self) -> dict[str, int]:
        """The number of calls by provider, most frequent first."""
        return dict(Counter(node.chosen for node in self.nodes).most_common())

    @property
    def reuses(self) -> list[Reuse]:
        """The memory decisions for all activations of in-place kernels."""
        return [reuse for node in self.nodes for reuse in node.reuse]

    @property
    def copies(self) -> int:
        """The number of copied activations."""
        return sum(reuse.copied for reuse in self.reuses)

    @property
    def fused(self) -> list[MatchReport]:
        """The successful fusions."""
        return [fusion for fusion in self.fusions if fusion.outcome == "fused"]

    @property
    def near_misses(self) -> list[MatchReport]:
        """The rejected fusions for which more than one op matched."""
        return [fusion for fusion in self.fusions if fusion.outcome != "fused"]

    @property
    def recognized(self) -> list[MatchReport]:
        """The recognized ops."""
        return [match for match in self.recognitions if match.outcome == "recognized"]

    @property
    def unrecognized(self) -> list[MatchReport]:
        """The near misses of recognition: most of a spelling matched."""
        return [match for match in self.recognitions if match.outcome != "recognized"]

    def outcomes(self) -> list[tuple[NodeReport, int]]:
        """Return one call per distinct outcome, with the number of such calls."""
        groups = _grouped(self.nodes, lambda node: node.outcome)
        return [(nodes[0], len(nodes)) for nodes in groups]

    def layer_groups(self) -> list[list[NodeReport]]:
        """Return the calls, grouped if they differ only in the layer index."""
        return _grouped(
            self.nodes, lambda node: (node.outcome, node.source, node.call, node.module_pattern)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {**asdict(self), "selected_impls": self.selected_impls}

    def to_json(self) -> str:
        """Return the report as JSON, for :meth:`from_json`."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`.

        Raises:
            ValueError, KeyError, TypeError: *text* is not a report.
        """
        data = json.loads(text)
        del data["selected_impls"]  # derived from the nodes
        for node in data["nodes"]:
            node["rejected"] = [Refusal(**refusal) for refusal in node["rejected"]]
            node["reuse"] = [Reuse(**reuse) for reuse in node["reuse"]]
        kinds: dict[str, type] = {"nodes": NodeReport, "passes": PassReport}
        kinds |= {"fusions": MatchReport, "recognitions": MatchReport}
        for name, kind in kinds.items():
            data[name] = [kind(**record) for record in data[name]]
        return cls(**data)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.from_cache and not self.complete:
            yield "compiled earlier, its report is missing"
            return
        where = "from the cache" if self.from_cache else f"{self.seconds * 1e3:.0f} ms in passes"
        yield f"{len(self.nodes)} calls of ops, {self.traces} traces, {where}"
        yield from self.remarks
        if self.nodes:
            counts = Counter((node.op, node.chosen) for node in self.nodes)
            rows = ((op, provider, str(calls)) for (op, provider), calls in counts.items())
            yield f"\n{text_table([('op', 'runs', 'calls'), *rows])}\n"
        for group in self.layer_groups():
            node = group[0]
            origin = f"  (fused from {', '.join(node.fused_from)})" if node.fused_from else ""
            if node.recognized_from:
                origin = f"  (recognized in {', '.join(node.recognized_from)})"
            yield f"{node.op} [{node.node}]{_times(group)} → {node.chosen}{origin}"
            yield f"    {node.source}"
            for refusal in node.rejected:
                yield f"    ✗ {refusal.provider}: {refusal.reason}  [{refusal.origin}]"
            for reuse in node.reuse:
                reason = f": {reuse.reason}" if reuse.reason else ""
                yield f"    {reuse.verb} {reuse.activation}{reason}"
        for kind, misses in (("fused", self.near_misses), ("recognized", self.unrecognized)):
            for alike_misses in alike(misses):
                miss = alike_misses[0]
                yield f"not {kind}: {miss.op} at {miss.node}{_times(alike_misses)}: {miss.reason}"
                yield f"    {miss.source}"


def _times(group: Sequence[object]) -> str:
    return f" ×{len(group)}" if len(group) > 1 else ""
