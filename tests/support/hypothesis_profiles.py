"""How many examples the property tests draw."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

_FULL = 100  # examples of a property that does not say how many it needs
_FEW = 25

settings.register_profile(
    "opweave",
    max_examples=_FULL,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# Every change draws other examples, so that a quarter of them finds as much in four changes.
settings.register_profile("ci", settings.get_profile("opweave"), max_examples=_FEW)
# A first look at a failure that takes long to shrink: pytest --hypothesis-profile=unshrunk
settings.register_profile(
    "unshrunk", settings.get_profile("opweave"), phases=[Phase.explicit, Phase.generate]
)


def share() -> float:
    """Return the share of a full run's examples that the profile draws."""
    return settings.default.max_examples / _FULL


def examples(count: int) -> settings:
    """Settings for *count* examples in a full run, and for the share of them that the profile has.

    Profiles do not apply to a number that is passed to :class:`hypothesis.settings`.
    """
    return settings(max_examples=max(1, int(count * share())))
