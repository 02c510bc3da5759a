"""Traits: what an implementation promises beyond computing the right values.

A promise is declared at registration, and verified by conformance, never taken on trust.
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
    BATCH_INVARIANT: "a row's bits do not depend on which other rows are in the batch",
    ROWWISE: "a row of every output is computed from that row of the activations alone",
    ALIAS_SAFE: "donated activations may have any strides, and overlap each other, themselves and "
    "other arguments: outputs are in new memory where the op's could not be in theirs",
    ROUNDS_LESS: "intermediate results are rounded less often than in the op's definition, so that "
    "outputs of 16 bits are more exact, and a unit in the last place away from native's",
    DIFFERENTIABLE: "autograd through the implementation gives the op's gradient",
}
"""What each trait promises."""


def check_traits(names: Iterable[str]) -> frozenset[str]:
    """Return *names* as a set.

    Raises:
        UnknownTraitError: one of them is no trait.

    >>> sorted(check_traits(["batch_invariant"]))
    ['batch_invariant']
    """
    traits = frozenset([names] if isinstance(names, str) else names)
    for name in sorted(traits - TRAITS.keys()):
        raise UnknownTraitError(f"unknown trait {name!r}. {did_you_mean(name, TRAITS)}")
    return traits
