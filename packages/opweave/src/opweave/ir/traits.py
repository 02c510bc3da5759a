"""Traits: promises of an implementation beyond correct values.

They are declared at registration and verified by the conformance kit.
"""

from __future__ import annotations

from collections.abc import Iterable

from opweave.ir.errors import UnknownTraitError, did_you_mean

BATCH_INVARIANT = "batch_invariant"
DIFFERENTIABLE = "differentiable"
ALIAS_SAFE = "alias_safe"
ROWWISE = "rowwise"
ROUNDS_LESS = "rounds_less"

TRAITS: dict[str, str] = {
    BATCH_INVARIANT: "the bits of a row do not depend on the other rows in the batch",
    ROWWISE: "each row of every output is computed from that row of the activations alone",
    ALIAS_SAFE: "donated activations may have any strides and overlap themselves, each other and "
    "other arguments; the kernel allocates outputs that cannot reuse their memory",
    ROUNDS_LESS: "intermediate results are rounded less often than in the op's definition, so that "
    "16-bit outputs are more accurate, and may differ from native by one unit in the last place",
    DIFFERENTIABLE: "autograd through the implementation gives the op's gradient",
}
"""The promise of each trait."""


def check_traits(names: Iterable[str]) -> frozenset[str]:
    """Return *names* as a set.

    Raises:
        UnknownTraitError: a trait does not exist.

    >>> sorted(check_traits(["batch_invariant"]))
    ['batch_invariant']
    """
    traits = frozenset([names] if isinstance(names, str) else names)
    for name in sorted(traits - TRAITS.keys()):
        raise UnknownTraitError(f"unknown trait {name!r}. {did_you_mean(name, TRAITS)}")
    return traits
