"""The registry of models by architecture.

A model is a class, or a reference ``"package.module:Class"`` that is imported on first use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opweave import transaction
from opweave.plugins import load_general_plugins, resolve_obj_by_qualname
from opweave.registration import Owner, current_owner
from opweave_engine.models import config as configs
from opweave_engine.models.weights import CheckpointModel

Model = type[CheckpointModel]


@dataclass(frozen=True)
class ModelEntry:
    """A registered model.

    Attributes:
        architecture: its name in ``config.json``.
        model: the class, or a reference to it.
        owner: the plugin that registered it, or None.
    """

    architecture: str
    model: str | Model
    owner: Owner | None

    def __str__(self) -> str:
        model = self.model
        name = f"{model.__module__}:{model.__qualname__}" if isinstance(model, type) else str(model)
        return name if self.owner is None else f"{name} of {self.owner}"

    def resolve(self) -> Model:
        """Return the class.

        Raises:
            InvalidModelError: the class does not exist, or is not a :class:`CheckpointModel`.
        """
        model: object = self.model
        if isinstance(self.model, str):
            try:
                model = resolve_obj_by_qualname(self.model)
            except ImportError as error:
                raise configs.InvalidModelError(
                    f"the model of {self.architecture}, {self}, cannot be imported: {error}"
                ) from error
        if not (isinstance(model, type) and issubclass(model, CheckpointModel)):
            raise configs.InvalidModelError(
                f"the model of {self.architecture}, {self}, is {model!r}; it must be a class that "
                "derives from opweave_engine.models.CheckpointModel, such as a CausalLM."
            )
        return model


_models: dict[str, ModelEntry] = {}


def register_model(architecture: str, model: str | Model) -> None:
    """Register *model* for checkpoints with *architecture* in ``config.json``.

    Args:
        architecture: as in ``"architectures": ["MyModelForCausalLM"]``.
        model: a class that derives from :class:`CheckpointModel`, or ``"package.module:Class"``,
            which is imported at first use.

    Raises:
        DuplicateModelError: the architecture already has a model.
        InvalidModelError: (a TypeError) *model* is neither.
    """
    entry = ModelEntry(architecture, model, current_owner())
    if not isinstance(model, str):
        entry.resolve()
    if architecture not in _models:
        transaction.enter(f"model {architecture}", _models, architecture, entry)
    elif _models[architecture] != entry:  # a plugin may be loaded twice
        raise configs.DuplicateModelError(
            f"{architecture} has a model already: {_models[architecture]}; so {entry} cannot be "
            "it. Install one of the two only, or give one another architecture."
        )


def supported_architectures() -> tuple[str, ...]:
    """Return the architectures that have a model, in alphabetical order."""
    return tuple(sorted(_models))


def model_class(config: Mapping[str, Any]) -> Model:
    """Return the model class for a parsed ``config.json``.

    Raises:
        UnsupportedModelError: the architecture is not supported; the message lists all supported
        ones. InvalidConfigError: the architecture is missing.
        InvalidModelError: the registered class cannot be imported, or is not a model.
        PluginError: a plugin that might provide the model failed to load.
    """
    load_general_plugins()
    fields = configs.Fields(config)
    named = fields.texts("architectures")
    if not named:
        raise configs.InvalidConfigError(
            f"{fields.name} lacks 'architectures', a list with the model's name. Supported: "
            f"{', '.join(supported_architectures())}."
        )
    architecture = fields.require("architectures", ", ".join(named), *supported_architectures())
    return _models[architecture].resolve()


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype) -> CheckpointModel:
    """Build the model for a parsed ``config.json``, without loading weights.

    It is one rank's part of the current :func:`~opweave.layers.parallel.tensor_parallel` group, on
    torch's default device.

    Raises:
        UnsupportedModelError: an architecture or feature that is not supported.
        InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        InvalidModelError: as :func:`model_class`.
    """
    return model_class(config).from_hf(config, dtype=dtype)


for _architecture, _model in {
    "BertForMaskedLM": "opweave_engine.models.bert:BertForMaskedLM",
    "BertModel": "opweave_engine.models.bert:BertModel",
    "DeepseekV3ForCausalLM": "opweave_engine.models.deepseek:DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM": "opweave_engine.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "opweave_engine.models.gemma3:Gemma3ForConditionalGeneration",
    "LlamaForCausalLM": "opweave_engine.models.llama:LlamaForCausalLM",
    "Mamba2ForCausalLM": "opweave_engine.models.mamba2:Mamba2ForCausalLM",
    "MistralForCausalLM": "opweave_engine.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "opweave_engine.models.mixture:MixtralForCausalLM",
    "Qwen2ForCausalLM": "opweave_engine.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "opweave_engine.models.llama:LlamaForCausalLM",
    "Qwen3MoeForCausalLM": "opweave_engine.models.mixture:Qwen3MoeForCausalLM",
}.items():
    register_model(_architecture, _model)
