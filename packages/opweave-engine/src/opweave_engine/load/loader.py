"""Loads any registered model, strictly: every weight is found, and nothing else."""

import logging
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from opweave.config import EngineConfig
from opweave.config.compilation import current_compilation_config
from opweave.config.engine import LoadFormat, ModelImpl
from opweave.layers.linear_methods import LinearMethod
from opweave.layers.parallel import ALONE, tensor_parallel
from opweave_engine import models
from opweave_engine.errors import CheckpointError, InvalidArgumentError, require
from opweave_engine.load.checkpoint import (
    DTYPES,
    MAX_LAYERS,
    Checkpoint,
    Progress,
    QuantizedSource,
    TensorSource,
    build,
    check_layers,
    check_memory,
    check_parameters,
    check_sizes,
    dtype_of,
    named_dtype,
    num_layers,
    shapes_of,
)
from opweave_engine.load.gguf import GgufTensors
from opweave_engine.load.quantized import (
    build_quantized,
    is_cache_scale,
    opened,
    quantization_errors,
    require_unquantized,
    without_quantization,
)
from opweave_engine.models.causal_lm import HEAD
from opweave_engine.models.config import Fields, warn_unread_rope_keys
from opweave_engine.transformers import loading
from opweave_engine.transformers.model import first_rank

# Progress callbacks of the engine.


@contextmanager
def reporting(
    progress: Progress | bool | None, title: str, then: str = ""
) -> Iterator[Progress | None]:
    """Yield what to call: *progress*; a bar on standard error, if that is True; or nothing."""
    if progress is not True:
        yield progress or None
        return
    from opweave.config.terminal import ProgressBar

    with ProgressBar(title, then=then) as bar:
        yield bar


def after_loading(config: object) -> str:
    """Return what an engine of that configuration does when its model is loaded."""
    compilation = config.compilation if isinstance(config, EngineConfig) else None
    compilation = compilation or current_compilation_config()
    return "compiling" if compilation.compiles else "warming up"


# CPU memory in huge pages.
#
# A decoding step reads all weights once. In pages of 4 KiB it waits for the translation of
# addresses as well: a core of a Zen 4 reads 18 to 21 GB/s from such pages, and 30 to 34 from
# pages of 2 MiB.


_HUGE_PAGE_BYTES = 2 << 20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor, in huge pages if it is large enough and they are available.

    This needs Linux, the CPU and at least 2 MiB. The system gives huge pages if
    ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or ``always`` and some are
    left; otherwise ordinary ones. The tensor is aligned to 2 MiB, by which kernels detect them.
    """
    size = math.prod(shape) * dtype.itemsize
    if not _uses_huge_pages(size, device):
        return torch.empty(*shape, dtype=dtype, device=device)
    # Not torch's allocator: it writes before the tensor, which makes a small page there.
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    start = -data.data_ptr() % _HUGE_PAGE_BYTES
    return data[start : start + size].view(dtype).view(*shape)


def move_parameters(module: nn.Module) -> None:
    """Move large parameters of *module* on the CPU to huge pages; their values are lost."""
    for parameter in module.parameters():
        if _uses_huge_pages(parameter.nbytes, parameter.device):
            parameter.data = empty(parameter.shape, parameter.dtype, parameter.device)


def _uses_huge_pages(size: int, device: torch.device) -> bool:
    return device.type == "cpu" and size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")


# Checkpoints whose configuration ties the output matrix that their files store separately.


_log = logging.getLogger(__name__)

_TIED_KEY = "tie_word_embeddings"


def untied(
    config: Mapping[str, Any],
    planned: models.CheckpointModel,
    files: Iterable[TensorSource],
    dtype: torch.dtype,
) -> Mapping[str, Any]:
    """Return *config*, with untied embeddings if the files hold two matrices that differ.

    As in transformers, the stored matrices win over the configuration.

    Args:
        config: the object in ``config.json``.
        planned: the model that it describes, without memory for its weights.
        files: the checkpoint's, in which every tensor has the shape that *planned* needs.
        dtype: in which the model is loaded; differences that it rounds away do not count.
    """
    if not (isinstance(planned, models.CausalLM) and planned.is_tied):
        return config
    head, embedding = (_read(name, files, dtype) for name in (HEAD, planned.embedding_name))
    if head is None or embedding is None or torch.equal(head, embedding):
        return config
    _log.warning(
        "config.json ties the embeddings (%s), but the files hold a different %s; both are loaded. "
        "Set %s to false in config.json to silence this warning",
        _TIED_KEY, HEAD, _TIED_KEY,
    )  # fmt: skip
    return {**config, _TIED_KEY: False}


def _read(name: str, files: Iterable[TensorSource], dtype: torch.dtype) -> Tensor | None:
    return next((file.tensor(name).to(dtype) for file in files if name in file.shapes()), None)


# Chooses whose code runs a model: opweave's, or transformers'.


def uses_transformers(config: Mapping[str, Any], model_impl: ModelImpl) -> bool:
    """Return whether transformers' code runs the model that the object in a config.json describes.

    Args:
        config: the object.
        model_impl: ``"auto"`` prefers opweave's model if it supports the configuration.

    Raises:
        MissingDependencyError: transformers is asked for and not installed.
        CheckpointError: the configuration's sizes are too large.
        ModelError: neither has the architecture, or the configuration is invalid.
    """
    if model_impl == "opweave":
        return False
    named = Fields(config).texts("architectures")
    architecture = named[0] if len(named) == 1 else ""
    if model_impl == "transformers":
        require("transformers", "transformers")
        if not loading.has_model(architecture, "causal_lm"):
            raise models.UnsupportedModelError(
                f"model_impl='transformers', but transformers has no causal language model "
                f"{', '.join(named) or 'without a name'}. Leave model_impl out."
            )
        return True
    try:
        models.model_class(config)
        if num_layers(config) <= MAX_LAYERS:
            with torch.device("meta"):
                build(without_quantization(config), torch.float32)
    except models.UnsupportedModelError as error:
        if not loading.is_available():
            raise models.UnsupportedModelError(
                f"{str(error).removesuffix('.')}. With transformers, its causal language models "
                "run, too: pip install 'opweave-engine[transformers]'."
            ) from error
        if not loading.has_model(architecture, "causal_lm"):
            raise
        if architecture in models.supported_architectures():
            _log.warning("transformers' code runs the model, because of opweave's: %s", error)
        return True
    return False


# Loads models by transformers' code, with the checks that all checkpoints get.


Model = TypeVar("Model", bound=models.CheckpointModel)


def load_by_transformers(
    load: Callable[..., Model],
    checkpoint: Checkpoint,
    dtype: str,
    seed: int | None,
    progress: Progress | None,
) -> Model:
    """Load a checkpoint's model by a function of :mod:`opweave_engine.transformers`.

    Args:
        load: a function of :mod:`opweave_engine.transformers`.
        checkpoint: the directory.
        dtype: ``"auto"``, or a name of ``DTYPES``.
        seed: of random weights; None: load those of the files.
        progress: called at the beginning and the end; transformers does not say how far it is.

    Raises:
        CheckpointError: a file is missing or damaged, or tensors do not fit the model.
        ModelError: the configuration is invalid or not supported, or the checkpoint is a GGUF
            file.
    """
    config = checkpoint.config()
    if checkpoint.gguf is not None:
        raise models.UnsupportedModelError(
            f"{checkpoint.path}: transformers' code does not run models from GGUF files; opweave's "
            "does. Leave model_impl out, or give a checkpoint directory."
        )
    check_sizes(config)
    weight_dtype = named_dtype(dtype, config)
    if seed is not None:
        check_layers(config, MAX_LAYERS, "there can be")
        weight_dtype = weight_dtype or torch.float32
        memory = partial(check_memory, dtype=weight_dtype)
        return load(checkpoint.path, config, weight_dtype, seed=seed, check=memory)
    with checkpoint.open_files() as files:
        plain = require_unquantized(config, checkpoint, files)
        shapes = shapes_of(files)
        check_layers(plain, len(shapes), "the number of tensors is")
        check = partial(check_parameters, held=sum(map(math.prod, shapes.values())))
        weight_dtype = weight_dtype or dtype_of(files)
    report = progress or (lambda *_: None)
    report(0, 1)
    with quantization_errors(config, checkpoint), fit_errors():
        model = load(checkpoint.path, plain, weight_dtype, seed=None, check=check)
    report(1, 1)
    return model


# Loads any registered model, strictly: every weight is found, and nothing else is there.


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    load_format: LoadFormat = "auto",
    model_impl: ModelImpl = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> models.CheckpointModel:
    """Build the model in the directory *path* and load its weights.

    It is on torch's default device; inside a :func:`~opweave.layers.parallel.tensor_parallel`
    block, it is one rank's part.

    Args:
        path: with ``config.json`` and safetensors files, sharded or not.
        dtype: ``"auto"`` for the checkpoint's, or one of ``DTYPES``: weights are cast to it.
        load_format: ``"auto"`` reads the safetensors files; ``"dummy"`` reads nothing but
            ``config.json``, and makes weights up: small random numbers.
        model_impl: as in :class:`~opweave.config.EngineConfig`.
        seed: of dummy weights.
        progress: called with the number of tensors loaded so far and in total.

    Raises:
        CheckpointError: a file is missing or damaged; or tensors are missing, unexpected or do not
            fit, in which case the message lists them together.
        InvalidArgumentError: *dtype* or *load_format* is something else.
        ModelError: the configuration is invalid or not supported.
    """
    dtype = check_dtype(dtype)
    if load_format not in (formats := get_args(LoadFormat)):
        raise InvalidArgumentError(
            f"load_format={load_format!r} is not supported. Supported: {', '.join(formats)}."
        )
    checkpoint = Checkpoint(path)
    config = checkpoint.config()
    # First: errors in the configuration are reported before missing files.
    if uses_transformers(config, model_impl):
        random_seed = seed if load_format == "dummy" else None
        return load_by_transformers(
            loading.load_transformers_model, checkpoint, dtype, random_seed, progress
        )
    warn_unread_rope_keys(config)
    weight_dtype = named_dtype(dtype, config)
    if load_format == "dummy":
        check_layers(config, MAX_LAYERS, "there can be")
        weight_dtype = weight_dtype or torch.float32
        with torch.device("meta"):
            check_memory(build(config, weight_dtype), weight_dtype)
        model = build(config, weight_dtype)
        move_parameters(model)
        model.fill_randomly(seed)
        return model.eval()
    with checkpoint.open_files() as files:
        fit: AbstractContextManager[None] = nullcontext()
        sources: Sequence[TensorSource]
        if checkpoint.gguf is not None:
            planned = planned_model(config, len(checkpoint.gguf.tensors))
            sources = [GgufTensors(checkpoint.gguf, planned)]
        else:
            original = config
            config, sources = opened(original, checkpoint, files)
            if sources == files:
                fit = quantization_errors(original, checkpoint)
        shapes = shapes_of(sources)
        with fit:
            planned = planned_model(config, len(shapes))
            is_tied = isinstance(planned, models.CausalLM) and planned.is_tied
            checkpoint.check_index(shapes_of(files), optional=HEAD if is_tied else None)
            check_shapes(planned, {n: s for n, s in shapes.items() if not is_cache_scale(n)})
        weight_dtype = weight_dtype or dtype_of(sources)
        values = untied(config, planned, sources, weight_dtype)
        model, packed = build_quantized(values, weight_dtype, sources)
        move_parameters(model)
        with fit_errors():
            model.load_weights(_tensors(sources, packed, progress or (lambda *_: None)))
    return model.eval()


def check_ranks(path: str | Path, size: int, model_impl: ModelImpl = "auto") -> None:
    """Build one rank's part of the model in directory *path*, without memory for its weights.

    Args:
        path: of the checkpoint.
        size: how many ranks there are.
        model_impl: as in :class:`~opweave.config.EngineConfig`.

    Raises:
        ShardingError: it cannot be divided over *size* tensor-parallel ranks.
        CheckpointError: ``config.json`` is missing or damaged.
        ModelError: the configuration is invalid or not supported.
    """
    checkpoint = Checkpoint(path)
    config = without_quantization(checkpoint.config())
    check_layers(config, MAX_LAYERS, "there can be")
    if uses_transformers(config, model_impl):
        loading.check_transformers_ranks(checkpoint.path, config, size)
        return
    models.model_class(config)
    with torch.device("meta"), tensor_parallel(first_rank(size)):
        build(config, torch.float32)


def as_language_model(model: models.CheckpointModel) -> models.LanguageModel:
    """Return *model*, which predicts the next token.

    Raises:
        UnsupportedModelError: it does not.
    """
    if not isinstance(model, models.LanguageModel):
        raise models.UnsupportedModelError(
            f"{type(model).__name__} does not generate text: it is not a causal language "
            "model. opweave_engine.Embedder makes vectors with encoders of texts; "
            "opweave_engine.load_model loads any model, to be called as a module."
        )
    return model


def check_dtype(dtype: str | torch.dtype) -> str:
    """Return the name of *dtype* if models can be loaded in it (else InvalidArgumentError)."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidArgumentError(
            f"dtype={dtype!r} is not supported. Supported: auto, {', '.join(DTYPES)}."
        )
    return dtype


def planned_model(config: Mapping[str, Any], tensors: int) -> models.CheckpointModel:
    """Return the unsharded model without memory for its weights, to compare shapes with it.

    A sharded layer would also accept a tensor of its shard's size, so a wrong shape would pass.
    """
    check_layers(config, tensors, "the number of tensors is")
    with torch.device("meta"), tensor_parallel(ALONE):
        return build(config, torch.float32)


def check_shapes(planned: models.CheckpointModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Load shapes alone, before memory is allocated: wrong sizes may ask for any amount of it."""
    with torch.device("meta"), tensor_parallel(ALONE), fit_errors():
        planned.load_weights((name, torch.empty(shape)) for name, shape in shapes.items())


@contextmanager
def fit_errors() -> Iterator[None]:
    """Raise CheckpointError where tensors do not fit a model."""
    try:
        yield
    except models.WeightsError as error:
        raise CheckpointError(str(error)) from error


def _tensors(
    sources: Sequence[TensorSource], packed: Mapping[str, LinearMethod], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by name; of the modules in *packed*, the parameters that they keep."""
    names = [(n, source) for source in sources for n in source.shapes() if not is_cache_scale(n)]
    for done, (name, source) in enumerate(names, start=1):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in packed and isinstance(source, QuantizedSource):
            for parameter, tensor in source.parameters(module, packed[module]).items():
                yield f"{module}.{parameter}", tensor
        else:
            yield name, source.tensor(name)
        progress(done, len(names))


# Loads encoders, and tells them from models that generate text.


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint makes embeddings or scores pairs, and does not generate text.

    Encoders, base models without a head, and all checkpoints of sentence-transformers make
    embeddings; sequence classifiers score pairs.

    Raises:
        CheckpointError, ModelError: the configuration is missing or damaged.
    """
    config = checkpoint.config()
    if checkpoint.json_list("modules.json") is not None:
        return True
    if (model := _own_class(config)) is not None:  # without a question to transformers
        return issubclass(model, models.Encoder)
    named = Fields(config).texts("architectures")
    return bool(named) and loading.has_model(named[0], "base", "masked_lm", "sequence_classifier")


def load_encoder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
) -> models.Encoder:
    """Build the encoder of a checkpoint, and load its weights.

    Args:
        checkpoint: the directory.
        config: says the format of the weights, the seed, and whose code runs the model.
        dtype, progress: as for :func:`load_model`.

    Raises:
        CheckpointError, ModelError: as for :func:`load_model`; or it is not an encoder.
    """
    dtype, values = check_dtype(dtype), checkpoint.config()
    model = _own_class(values)
    if (
        model is not None
        and issubclass(model, models.Encoder)
        and config.model_impl != "transformers"
    ):
        loaded = load_model(
            checkpoint.path,
            dtype=dtype,
            load_format=config.load_format,
            seed=config.seed,
            progress=progress,
        )
        assert isinstance(loaded, models.Encoder), f"{type(loaded)=} is registered as an encoder"
        return loaded
    architectures = Fields(values).texts("architectures")
    if not is_encoder(checkpoint) or config.model_impl == "opweave":
        raise models.UnsupportedModelError(
            f"{', '.join(architectures) or 'The model'} is not an encoder, so it cannot make "
            "embeddings. opweave_engine.LLM runs language models."
        )
    # All checkpoints with modules.json make embeddings, also those that have a classifier's head.
    has_modules = checkpoint.json_list("modules.json") is not None
    scores = not has_modules and loading.has_model(architectures[0], "sequence_classifier")
    load = partial(loading.load_transformers_encoder, scores=scores)
    random_seed = config.seed if config.load_format == "dummy" else None
    return load_by_transformers(load, checkpoint, dtype, random_seed, progress)


def _own_class(config: Mapping[str, Any]) -> type[models.CheckpointModel] | None:
    """Return opweave's model of the architecture, or None."""
    try:
        return models.model_class(config)
    except models.UnsupportedModelError:
        return None
