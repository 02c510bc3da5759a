"""Loads a model from a checkpoint, strictly: every weight is found, and nothing else is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from opweave.engine.checkpoint import Checkpoint, TensorFile
from opweave.engine.errors import CheckpointError, InvalidArgumentError
from opweave.models import LlamaConfig, LlamaForCausalLM, checkpoint_tensors

Progress = Callable[[int, int], None]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SHOWN = 10  # names of each kind in an error


def load_model(
    path: str | Path, *, dtype: str | torch.dtype = "auto", progress: Progress | None = None
) -> LlamaForCausalLM:
    """Build the model that directory *path* holds, and load its weights.

    Args:
        path: with ``config.json`` and safetensors files, sharded or not.
        dtype: ``"auto"`` for the checkpoint's, or one of ``DTYPES``: weights are cast to it.
        progress: called with the number of tensors loaded so far and in total.

    Raises:
        CheckpointError: a file is missing or damaged; or tensors are missing, unexpected or of the
            wrong shape, in which case the message lists them together.
        InvalidArgumentError: *dtype* is something else.
        ModelError: the configuration is invalid or not supported.
    """
    dtype = check_dtype(dtype)
    checkpoint = Checkpoint(path)
    config = LlamaConfig.from_hf(checkpoint.config())
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(file)) for file in checkpoint.tensor_files()]
        found = {n: (file, shape) for file in files for n, shape in file.shapes().items()}
        # Older checkpoints also hold the rotary frequencies, which follow from the configuration.
        found = {n: entry for n, entry in found.items() if not n.endswith("rotary_emb.inv_freq")}
        resolved = _resolve(dtype, config, files)
        _check_depth(config, len(found))
        # Shapes are compared before memory is allocated: wrong sizes may ask for any amount of it.
        planned = checkpoint_tensors(LlamaForCausalLM(config, dtype=resolved, device="meta"))
        _check(config, planned, {name: shape for name, (_, shape) in found.items()})
        model = LlamaForCausalLM(config, dtype=resolved)
        _fill(model, {n: file for n, (file, _) in found.items()}, progress or (lambda *_: None))
    return model.eval()


def _check_depth(config: LlamaConfig, num_tensors: int) -> None:
    """Refuse more layers than there are tensors, before they are built one by one."""
    if config.num_hidden_layers > num_tensors:
        raise CheckpointError(
            f"config.json says num_hidden_layers={config.num_hidden_layers}, but the checkpoint "
            f"has {num_tensors} tensors."
        )


def check_dtype(dtype: str | torch.dtype) -> str:
    """Return the name of *dtype* if models can be loaded in it (else InvalidArgumentError)."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidArgumentError(
            f"dtype={dtype!r} is not supported. Supported: auto, {', '.join(DTYPES)}."
        )
    return dtype


def _resolve(dtype: str, config: LlamaConfig, files: list[TensorFile]) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    if config.dtype in DTYPES:
        return DTYPES[config.dtype]
    if config.dtype is not None:
        raise CheckpointError(
            f"config.json has dtype {config.dtype!r}, which dtype='auto' cannot follow. "
            f"Choose one of: {', '.join(DTYPES)}."
        )
    for file in files:
        for name in list(file.shapes())[:1]:
            if (saved := file.tensor(name).dtype) in DTYPES.values():
                return saved
    return torch.float32


def _target(name: str, config: LlamaConfig) -> str:
    """Return the name of the weight that tensor *name* of a checkpoint fills."""
    return _EMBEDDING if config.tie_word_embeddings and name == _HEAD else name


def _check(
    config: LlamaConfig, planned: dict[str, Tensor], found: dict[str, tuple[int, ...]]
) -> None:
    filled = {name: _target(name, config) for name in found}
    problems = {
        "missing": sorted(planned.keys() - filled.values()),
        "unexpected": sorted(name for name, target in filled.items() if target not in planned),
        "of the wrong shape": [
            f"{name} {found[name]}, not {tuple(planned[target].shape)}"
            for name, target in filled.items()
            if target in planned and found[name] != planned[target].shape
        ],
    }
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names]
    if lines:
        text = "; ".join(lines)
        raise CheckpointError(f"The checkpoint's tensors do not fit config.json. {text}.")


def _fill(model: LlamaForCausalLM, found: dict[str, TensorFile], progress: Progress) -> None:
    weights, loaded = checkpoint_tensors(model), set[str]()
    for done, (name, file) in enumerate(found.items(), start=1):
        source, target = file.tensor(name), _target(name, model.config)
        if not source.is_floating_point():
            raise CheckpointError(
                f"{name} has dtype {source.dtype}; quantized checkpoints are not supported."
            )
        if target not in loaded:
            weights[target].copy_(source)
        elif not torch.equal(source.to(model.dtype), weights[target]):
            raise CheckpointError(
                f"config.json ties the embeddings, but {_HEAD} differs from {_EMBEDDING}. Set "
                "'tie_word_embeddings' to false in config.json to use both."
            )
        loaded.add(target)
        progress(done, len(found))


def _some(names: list[str]) -> str:
    hidden = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")
