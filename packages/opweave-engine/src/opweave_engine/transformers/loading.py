"""Load models with transformers' own code, strictly.

transformers is imported only when such a model is loaded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from opweave.ir.errors import described
from opweave.packages import is_installed
from opweave_engine.models.config import InvalidConfigError, WeightsError
from opweave_engine.models.weights import check_fit
from opweave_engine.transformers.encoder import TransformersCrossEncoder, TransformersEncoder
from opweave_engine.transformers.model import TransformersModel, check_ranks

Check = Callable[[torch.nn.Module], None]
Kind = Literal["base", "causal_lm", "masked_lm", "sequence_classifier"]
_MAPPINGS: Mapping[Kind, str] = {
    "base": "MODEL_MAPPING_NAMES",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence_classifier": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


def is_available() -> bool:
    """Whether transformers is installed."""
    return is_installed("transformers")


def has_model(architecture: str, *kinds: Kind) -> bool:
    """Whether transformers has a model of that name, as in ``config.json``, of one of *kinds*.

    Base models have no head, masked language models predict masked tokens, and sequence classifiers
    classify texts.
    """
    if not is_available():
        return False
    from transformers.models.auto import modeling_auto

    models = [getattr(modeling_auto, _MAPPINGS[kind]) for kind in kinds]
    return any(architecture in by_type.values() for by_type in models)


def load_transformers_model(
    path: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    check: Check | None = None,
) -> TransformersModel:
    """Build the model in the directory *path* and load its weights.

    Every rank of a tensor-parallel group reads all weights, and keeps its part.

    Args:
        path: with ``config.json`` and safetensors files.
        config: the object in ``config.json``.
        dtype: of weights and activations.
        seed: make weights up: small random numbers. None: load the checkpoint's.
        check: called with the model without memory for its weights, before memory is allocated.

    Raises:
        InvalidConfigError: transformers refuses the configuration.
        UnsupportedModelError: the model cannot run in the engine.
        ShardingError: it cannot be divided over the current tensor-parallel ranks.
        WeightsError: tensors are missing, unexpected or do not fit.
    """
    with _quiet():
        return TransformersModel(_model(path, _class(config), dtype, seed, check))


def check_transformers_ranks(path: Path, config: Mapping[str, Any], size: int) -> None:
    """Check that the model in directory *path* can be divided over *size* ranks.

    Raises:
        InvalidConfigError: transformers refuses the configuration.
        ShardingError: it cannot be divided.
    """
    with _quiet(), torch.device("meta"):
        check_ranks(_built(path, _class(config), torch.float32), size)


def load_transformers_encoder(
    path: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    check: Check | None = None,
    scores: bool = False,
) -> TransformersEncoder:
    """Build the base model of the checkpoint in directory *path*, and load its weights.

    Heads and poolers are left out.

    Args:
        path, config, dtype, seed, check: as for :func:`load_transformers_model`.
        scores: keep the head of a sequence classifier, in a :class:`TransformersCrossEncoder`.

    Raises:
        InvalidConfigError: transformers refuses the configuration.
        UnsupportedModelError: a sequence classifier does not have one label.
        WeightsError: tensors are missing, unexpected or do not fit.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    with _quiet():
        if scores:
            auto = AutoModelForSequenceClassification
            return TransformersCrossEncoder(_model(path, auto, dtype, seed, check))
        has_head = not has_model(config["architectures"][0], "base")
        leniency = {"may_lack": "pooler.", "may_have_more": has_head}
        return TransformersEncoder(_model(path, AutoModel, dtype, seed, check, **leniency))


def _class(config: Mapping[str, Any]) -> Any:
    import transformers

    (architecture,) = config["architectures"]
    return getattr(transformers, architecture)


def _model(
    path: Path,
    model_class: Any,
    dtype: torch.dtype,
    seed: int | None,
    check: Check | None,
    **leniency: Any,
) -> Any:
    """Return a checkpoint's model, or with a *seed* one with random weights; see ``_loaded``."""
    if check is not None:
        with torch.device("meta"):
            planned = _built(path, model_class, dtype)
        check(planned)
    if seed is None:
        return _loaded(path, model_class, dtype, **leniency).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _built(path, model_class, dtype).eval()


def _built(path: Path, model_class: Any, dtype: torch.dtype) -> Any:
    # The classes that choose a model by its configuration have the public method.
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with _errors_of_config(path):
        return build(_typed(path), dtype=dtype)


def _typed(path: Path) -> Any:
    from transformers import AutoConfig

    typed = AutoConfig.from_pretrained(path, local_files_only=True)
    if hasattr(typed, "quantization_config"):  # transformers would quantize plain weights
        del typed.quantization_config
    return typed


@contextmanager
def _errors_of_config(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # values that do not fit raise errors of any kind
        raise InvalidConfigError(
            f"transformers refuses {path / 'config.json'}: {described(error)}"
        ) from error


def _loaded(
    path: Path,
    model_class: Any,
    dtype: torch.dtype,
    *,
    may_lack: str | tuple[()] = (),
    may_have_more: bool = False,
) -> Any:
    with _errors_of_config(path):
        typed = _typed(path)
    try:
        model, loaded = model_class.from_pretrained(
            path,
            config=typed,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed below
        )
    except Exception as error:
        raise WeightsError(f"transformers cannot load {path}: {described(error)}") from error
    check_fit(
        {
            "missing": sorted(n for n in loaded["missing_keys"] if not n.startswith(may_lack)),
            "unexpected": [] if may_have_more else sorted(loaded["unexpected_keys"]),
            "do not fit": sorted(name for name, *_ in loaded["mismatched_keys"]),
        }
    )
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing a report and progress bars: errors say the same."""
    from transformers.utils import logging

    library_log: Any = logging  # without types
    level, shows_bars = library_log.get_verbosity(), library_log.is_progress_bar_enabled()
    library_log.set_verbosity_error()
    library_log.disable_progress_bar()
    try:
        yield
    finally:
        library_log.set_verbosity(level)
        if shows_bars:
            library_log.enable_progress_bar()
