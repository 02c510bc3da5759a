"""I/O processors: plugins that turn custom requests into prompts, and outputs into results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from opweave.config import EngineConfig
from opweave.plugins import IO_PROCESSOR_PLUGINS, resolve_obj_by_qualname
from opweave.plugins.errors import PluginTypeError
from opweave.plugins.installed import loader
from opweave_engine.errors import CheckpointError, InvalidArgumentError
from opweave_engine.loading.checkpoint import Checkpoint
from opweave_engine.request.outputs import EmbeddingOutput, RequestOutput
from opweave_engine.request.prompts import Prompt
from opweave_engine.sampling.sampling_params import SamplingParams

_FIELD = "io_processor_plugin"  # of config.json


class IOProcessor(ABC):
    """Turns a request into prompts, and their outputs into a result.

    The function of a plugin returns the qualified name of a class derived from this one.
    :meth:`opweave_engine.LLM.process`, :meth:`opweave_engine.Embedder.process` and the server's
    ``/v1/process`` call it. The server does so in several threads.

    Args:
        config: the engine's configuration.

    Attributes:
        embeds: whether the prompts are for an encoder, so that outputs are vectors.
    """

    embeds: ClassVar[bool] = False

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def prompts(self, request: Any) -> Sequence[Prompt]:
        """Return the prompts of a request.

        Raises:
            OpweaveError, ValueError: the request is malformed; the message is for the client.
        """

    def sampling_params(self, request: Any) -> SamplingParams | None:
        """Return the sampling parameters; None: the defaults. Raises like :meth:`prompts`."""
        return None

    @abstractmethod
    def result(
        self, request: Any, outputs: Sequence[RequestOutput] | Sequence[EmbeddingOutput]
    ) -> Any:
        """Return the answer to a request; *outputs* are in the order of its prompts.

        The server sends it as JSON.
        """


class IOProcessors:
    """The I/O processors of one engine, each created on first use.

    Args:
        checkpoint: may name a plugin, as ``io_processor_plugin`` in its ``config.json``.
        config: of the engine.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._made: dict[str, IOProcessor] = {}

    def find(self, name: str | None = None) -> IOProcessor | None:
        """Return the processor of plugin *name*; None: the checkpoint's, if it names one.

        Raises:
            UnknownPluginError, PluginTypeError, PluginError: as :func:`io_processor` raises them.
            CheckpointError: the checkpoint's value is not a string.
        """
        name = self._checkpoint.config().get(_FIELD) if name is None else name
        if name is None:
            return None
        if not isinstance(name, str):
            raise CheckpointError(
                f"config.json says {_FIELD}={name!r}; it must be the name of a plugin."
            )
        if name not in self._made:
            self._made[name] = io_processor(name, self._config)
        return self._made[name]

    def get(self, name: str | None, *, embeds: bool) -> IOProcessor:
        """Return the result of :meth:`find`, checked for an encoder or a text model.

        Raises:
            InvalidArgumentError: no processor is named, or it is for the other kind of model.
        """
        if (found := self.find(name)) is None:
            raise InvalidArgumentError(
                f"No I/O processor is named: {self._checkpoint.path / 'config.json'} has no "
                f"{_FIELD}. Name a plugin: process(request, io_processor=NAME), or "
                "opweave serve --io-processor NAME."
            )
        if found.embeds != embeds:
            kinds = ("models that generate text", "encoders")
            raise InvalidArgumentError(
                f"I/O processor {type(found).__name__} is for {kinds[found.embeds]}, but the model "
                f"is one of the {kinds[embeds]}."
            )
        return found


def io_processor(name: str, config: EngineConfig) -> IOProcessor:
    """Return an instance of the I/O processor of plugin *name*.

    Raises:
        UnknownPluginError: (a LookupError) there is no such plugin; the message lists all.
        PluginTypeError: (a TypeError) the plugin does not name an :class:`IOProcessor`.
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
