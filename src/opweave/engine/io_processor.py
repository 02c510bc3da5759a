"""I/O processors: plugins that turn requests of their own form into prompts, and answers back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from opweave.config import EngineConfig
from opweave.engine.outputs import RequestOutput
from opweave.engine.prompts import Prompt
from opweave.engine.sampling_params import SamplingParams
from opweave.plugins import IO_PROCESSOR_PLUGINS, resolve_obj_by_qualname
from opweave.plugins.errors import PluginTypeError
from opweave.plugins.installed import loader


class Generates(Protocol):
    """What answers prompts: an :class:`opweave.engine.LLM`."""

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]: ...


class IOProcessor(ABC):
    """Turns a request into prompts, and their answers into a result.

    The function of a plugin returns the qualified name of a class derived from this one.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def prompts(self, request: Any) -> Sequence[Prompt]:
        """Return the prompts of a request.

        Raises:
            OpweaveError: the request is malformed; the message is for whoever sent it.
        """

    def sampling_params(self, request: Any) -> SamplingParams | None:
        """Return how to sample; None for the defaults."""
        return None

    @abstractmethod
    def result(self, request: Any, outputs: Sequence[RequestOutput]) -> Any:
        """Return the answer to a request; *outputs* are in the order of its prompts."""

    def run(self, llm: Generates, request: Any) -> Any:
        """Answer *request* with *llm*."""
        outputs = llm.generate(self.prompts(request), self.sampling_params(request))
        return self.result(request, outputs)


def io_processor(name: str, config: EngineConfig) -> IOProcessor:
    """Return an object of the I/O processor that the plugin *name* brings.

    Raises:
        UnknownPluginError: (a LookupError) there is none; the message lists those that are.
        PluginTypeError: (a TypeError) what the plugin names is no :class:`IOProcessor`.
        PluginError: the plugin failed.
    """
    plugin = loader().find(IO_PROCESSOR_PLUGINS, name)
    qualname = plugin.returned if plugin.returned is not None else plugin.call()
    found = resolve_obj_by_qualname(qualname) if isinstance(qualname, str) else qualname
    if not (isinstance(found, type) and issubclass(found, IOProcessor)):
        raise PluginTypeError(
            f"{plugin.entry} returned {qualname!r}; it should be the qualified name of a class "
            f"derived from {IOProcessor.__module__}.IOProcessor."
        )
    return found(config)
