"""Plugin settings from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opweave.config.environment import flag
from opweave.ir.errors import did_you_mean
from opweave.plugins.claim import BUILTIN_PLATFORMS
from opweave.plugins.errors import PluginPolicyError

PLUGINS = "OPWEAVE_PLUGINS"
PLATFORM = "OPWEAVE_PLATFORM"
STRICT = "OPWEAVE_PLUGINS_STRICT"
TIMEOUT = "OPWEAVE_PLUGIN_TIMEOUT"

# Ends a hang within two seconds; registrations take milliseconds.
DEFAULT_TIMEOUT = 1.5


@dataclass(frozen=True)
class PluginPolicy:
    """The user's settings about plugins.

    Attributes:
        only: the plugins to use; None: all.
        without: disabled plugins.
        platform: the platform to use, regardless of claims.
        strict: whether a failed plugin is an error.
        timeout: time limit of a plugin's function in seconds, without imports.
    """

    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    platform: str | None = None
    strict: bool = True
    timeout: float = DEFAULT_TIMEOUT

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> PluginPolicy:
        """Read the policy from environment variables.

        Raises:
            PluginPolicyError: (a ValueError) a plugin is both enabled and disabled, or the timeout
            is not a positive number.
            SettingError: ``OPWEAVE_PLUGINS_STRICT`` is neither true nor false.
        """
        only, without = _names(environ.get(PLUGINS))
        return cls(
            only,
            without,
            environ.get(PLATFORM, "").strip() or None,
            flag(STRICT, environ) if environ.get(STRICT, "").strip() else True,
            _seconds(environ.get(TIMEOUT, "")),
        )

    def permits(self, name: str) -> bool:
        """Return whether a plugin of that name is used."""
        return name not in self.without and (self.only is None or name in self.only)

    def check(self, installed: Iterable[str]) -> None:
        """Check that the plugins named are among those *installed*.

        Raises:
            PluginPolicyError: (a ValueError) a plugin is not installed, and is not one of opweave's
            platforms.
        """
        names = {*installed}
        for name in sorted({*(self.only or ()), *self.without} - names):
            raise PluginPolicyError(
                f"{PLUGINS} names {name!r}, but no plugin is called that. "
                f"{did_you_mean(name, names)} Mend {PLUGINS}, or install the package that has it."
            )
        platforms = names | {*BUILTIN_PLATFORMS}
        if self.platform is not None and self.platform not in platforms:
            raise PluginPolicyError(
                f"{PLATFORM}={self.platform!r}: no platform is called that. "
                f"{did_you_mean(self.platform, platforms)} Mend {PLATFORM}, or install the package "
                "that has it."
            )

    def leaving_out(self, name: str) -> str:
        """Return the setting that leaves out a plugin and keeps this policy otherwise.

        >>> chosen = PluginPolicy(only=frozenset({"a", "b"}))
        >>> PluginPolicy().leaving_out("acme"), chosen.leaving_out("a")
        ('OPWEAVE_PLUGINS=-acme', 'OPWEAVE_PLUGINS=b')
        """
        if self.only is not None:
            return f"{PLUGINS}={','.join(sorted(self.only - {name}))}"
        return f"{PLUGINS}={','.join(f'-{each}' for each in sorted(self.without | {name}))}"


def _names(value: str | None) -> tuple[frozenset[str] | None, frozenset[str]]:
    if value is None:
        return None, frozenset()
    tokens = [token.strip() for token in value.split(",")]
    without = frozenset(token[1:].strip() for token in tokens if token.startswith("-"))
    only = frozenset(token for token in tokens if token and not token.startswith("-"))
    if both := sorted(only & without):
        raise PluginPolicyError(
            f"{PLUGINS}={value!r} both asks for {both[0]!r} and leaves it out. Keep one of the two."
        )
    if "" in without:
        raise PluginPolicyError(
            f"{PLUGINS}={value!r} has a '-' without a name. Expected names, separated by commas: "
            "'a,b' for these alone, '-a' for all others."
        )
    return (None if without and not only else only), without


def _seconds(value: str) -> float:
    if not value.strip():
        return DEFAULT_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PluginPolicyError(f"{TIMEOUT}={value!r} should be a number of seconds above 0.")
    return seconds
