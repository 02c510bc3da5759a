"""The plan of one compilation: the selection policy of every op, the options and the passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from opweave import ir
from opweave.compile import fingerprint
from opweave.compile.nodes import IrCall
from opweave.compile.options import CompileOptions, Priorities
from opweave.compile.plugin_passes import PluginPass, plugin_passes
from opweave.ir import IrOp, Policy, Registry, Selection
from opweave.ir.errors import UnknownOpError, did_you_mean
from opweave.ir.priority import ALWAYS_LAST, NATIVE, Entries, merge, parse
from opweave.ir.selection import native_for


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
        cls,
        registries: Sequence[Registry],
        options: CompileOptions,
        size: int | None = None,
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
        parts += [each.digest for each in self.passes]
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
    found: dict[str, list[Entries]] = {}
    known = {name for registry in registries for name in registry.ops}
    for origin, given in lists:
        for name, providers in given.items():
            if name not in known:
                raise UnknownOpError(f"{origin}: unknown op {name!r}. {did_you_mean(name, known)}")
            found.setdefault(name, []).append(parse(providers, f"{origin}[{name!r}]"))
    return {name: _without_native_last(merge(entries)) for name, entries in found.items()}


def _without_native_last(entries: Entries) -> Entries:
    """Remove the native entry that :func:`merge` appended: weaker lists follow before native."""
    return tuple(e for e in entries if not (e.provider == NATIVE and e.origin == ALWAYS_LAST))
