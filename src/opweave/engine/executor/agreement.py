"""What all ranks of an engine must agree on before one of them computes anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

from opweave import ir, platforms
from opweave.engine.errors import RankFailedError
from opweave.engine.executor.messages import PROTOCOL
from opweave.ir.selection import policy_for
from opweave.platforms import Platform
from opweave.plugins import GENERAL_PLUGINS, State, load_general_plugins, plugin_report


@dataclass(frozen=True)
class Agreement:
    """What holds in the process of the first rank; JSON, which any version can read.

    Attributes:
        protocol: the version of the messages between ranks.
        platform: what :meth:`opweave.platforms.Resolution.to_json` says, versions included.
        plugins: the general plugins that are in use, with distribution and version.
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
        """Take down what holds in this process, and in the scope that calls."""
        load_general_plugins()
        ir.current_registry().ensure_ready()
        platform = platforms.resolution().to_json()
        return cls(PROTOCOL, platform, _plugins(), _priorities(), _required())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            RankFailedError: the first rank speaks another version of the protocol.
        """
        data = json.loads(text)
        if data.get("protocol") != PROTOCOL:
            raise RankFailedError(
                f"the first rank speaks version {data.get('protocol')} of the protocol between "
                f"ranks; this process speaks {PROTOCOL}. Install the same opweave for all."
            )
        return cls(**data)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def impose(self) -> Platform:
        """Make this process agree; return the platform.

        Raises:
            PlatformMismatchError: it runs on another platform already, or with other versions.
            RankFailedError: it has other plugins.
        """
        platform = platforms.impose(self.platform).platform
        load_general_plugins()
        if (found := _plugins()) != self.plugins:
            raise RankFailedError(
                f"the first rank uses the general plugins {_listed(self.plugins)}; this process "
                f"finds {_listed(found)}. All ranks must use one environment."
            )
        return platform

    @contextmanager
    def selection(self) -> Iterator[None]:
        """Let ops be selected as on the first rank.

        Raises:
            IrError: an op or a provider is unknown here.
            RankFailedError: an op is tried with other providers all the same.
        """
        ir.current_registry().ensure_ready()
        own = _priorities()
        others = {op: names for op, names in self.priorities.items() if own.get(op) != names}
        with ir.priority(others), ir.require(*self.required):
            for op, names in _priorities().items():
                if names != self.priorities.get(op):
                    raise RankFailedError(
                        f"the first rank tries {_listed(self.priorities.get(op, []))} for op "
                        f"{op!r}; this process tries {_listed(names)}. All ranks must use one "
                        "environment."
                    )
            yield


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
