"""The settings that all processes of an engine must agree on before they compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

from opweave import ir, platforms
from opweave.ir.selection import policy_for
from opweave.platforms import Platform
from opweave.plugins import GENERAL_PLUGINS, State, load_general_plugins, plugin_report
from opweave_engine.errors import RankFailedError
from opweave_engine.parallel.executor.messages import PROTOCOL

_PARENT = "the first process"


@dataclass(frozen=True)
class Agreement:
    """The settings of the process that starts the others; sent as JSON, for other versions.

    Attributes:
        protocol: the version of the messages between processes.
        platform: the result of :meth:`opweave.platforms.Resolution.to_json`, with versions.
        plugins: the active general plugins, with distribution and version.
        priorities: the providers of each op, in the order in which they are tried.
        required: the traits that an implementation must have.
    """

    protocol: int
    platform: str
    plugins: list[str]
    priorities: dict[str, list[str]]
    required: list[str]

    @classmethod
    def here(cls) -> Self:
        """Return the settings of this process and of the calling scope."""
        load_general_plugins()
        ir.current_registry().ensure_ready()
        platform = platforms.resolution().to_json()
        return cls(PROTOCOL, platform, _plugins(), _priorities(), _required())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of :meth:`to_json`.

        Raises:
            RankFailedError: the first process uses another version of the protocol.
        """
        data = json.loads(text)
        if data.get("protocol") != PROTOCOL:
            raise RankFailedError(
                f"{_PARENT} speaks version {data.get('protocol')} of the protocol between "
                f"processes; this process speaks {PROTOCOL}. Install the same opweave for all."
            )
        return cls(**data)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def impose(self) -> Platform:
        """Apply the settings to this process; return the platform.

        Raises:
            PlatformMismatchError: this process already uses another platform, or other versions.
            RankFailedError: this process has other plugins.
        """
        platform = platforms.impose(self.platform).platform
        load_general_plugins()
        if (found := _plugins()) != self.plugins:
            raise RankFailedError(
                f"{_PARENT} uses the general plugins {_listed(self.plugins)}; this process "
                f"finds {_listed(found)}. Both must use one environment."
            )
        return platform

    @contextmanager
    def selection(self) -> Iterator[None]:
        """Select ops as in the first process, inside the block.

        Raises:
            IrError: an op or a provider is unknown in this process.
            RankFailedError: an op would still use other providers.
        """
        with ir.priority(self._differences()), ir.require(*self.required):
            self._check_priorities()
            yield

    def settle(self) -> None:
        """Select ops as in the first process, in this whole process from now on.

        Raises:
            IrError, RankFailedError: as :meth:`selection`.
        """
        lists, settings = self._differences(), ir.current_registry().settings
        settings.set_priorities(ir.Source.COMMAND_LINE, lists, _PARENT)
        settings.require(ir.Source.COMMAND_LINE, self.required, _PARENT)
        ir.current_registry().check_settings()
        self._check_priorities()

    def _differences(self) -> dict[str, list[str]]:
        ir.current_registry().ensure_ready()
        own = _priorities()
        return {op: names for op, names in self.priorities.items() if own.get(op) != names}

    def _check_priorities(self) -> None:
        for op, names in _priorities().items():
            if names != self.priorities.get(op):
                raise RankFailedError(
                    f"{_PARENT} tries {_listed(self.priorities.get(op, []))} for op "
                    f"{op!r}; this process tries {_listed(names)}. Both must use one environment."
                )


def _plugins() -> list[str]:
    return sorted(
        f"{record.name} ({record.distribution} {record.version})"
        for record in plugin_report()
        if record.group == GENERAL_PLUGINS and record.state is State.LOADED
    )


def _priorities() -> dict[str, list[str]]:
    ops = ir.current_registry().ops
    return {name: op.get_priority() for name, op in sorted(ops.items())}


def _required() -> list[str]:
    ops = ir.current_registry().ops.values()
    return sorted({trait for op in ops for trait in policy_for(op).required})


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
