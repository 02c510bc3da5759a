"""The tensors of a GGUF file under the names that Hugging Face's checkpoints give them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opweave.ir.ops.gguf_blocks import GGUF_BLOCKS
from opweave.layers.linear import LinearMethod
from opweave.layers.linear.low_bit import BlockMethod
from opweave_engine.dependencies import require
from opweave_engine.errors import CheckpointError
from opweave_engine.loading.gguf.config import ROPE_FACTORS
from opweave_engine.loading.gguf.file import GgufFile, GgufTensor
from opweave_engine.models import CheckpointModel
from opweave_engine.models.weights import shown_name

_log = logging.getLogger(__name__)

_PLAIN = ("F32", "F16", "BF16", "F64")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Of the arithmetic of the file's q and k, whose rows llama.cpp wants in another order.
_PERMUTED = ("llama",)


@dataclass(frozen=True)
class _Place:
    """Where a tensor of the model is: a tensor of the file, and the expert's index in it."""

    name: str
    expert: int | None = None


class GgufTensors:
    """The weights of a file: a :class:`~opweave_engine.loading.sources.QuantizedSource`.

    Args:
        contents: the file.
        model: the model that it is for, without memory for its weights.

    Raises:
        CheckpointError: a tensor has a name that the model does not know.
    """

    def __init__(self, contents: GgufFile, model: CheckpointModel) -> None:
        self._contents = contents
        self._places = dict(self._find(model))
        used = {place.name for place in self._places.values()}
        factors = {ROPE_FACTORS} if contents.architecture == "llama" else set()
        if unknown := sorted(contents.tensors.keys() - used - factors):
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            raise CheckpointError(
                f"{contents.path} has tensors that {type(model).__name__} does not use: "
                f"{', '.join(map(shown_name, unknown[:8]))}{more}."
            )
        self._check_kinds()
        self.methods = dict(self._methods())
        self._log_formats()

    @property
    def file(self) -> Path:
        return self._contents.path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: self._entry(name).shape[place.expert is not None :]
            for name, place in self._places.items()
        }

    def tensor(self, name: str) -> Tensor:
        entry, data = self._entry(name), self._data(name)
        kind = entry.kind.name
        if kind not in _PLAIN or kind == "BF16":
            data = require("gguf.quants").dequantize(data, entry.kind)
        found = torch.from_numpy(np.array(data))
        if kind == "BF16":
            found = found.bfloat16()
        # The file has the weight of a norm as it is multiplied by; Gemma's is one less.
        is_gemma = self._contents.architecture == "gemma3"
        return found - 1 if is_gemma and name.endswith("norm.weight") else found

    def parameters(self, module: str, method: LinearMethod) -> dict[str, Tensor]:
        return {"weight": torch.from_numpy(np.array(self._data(f"{module}.weight")))}

    def _entry(self, name: str) -> GgufTensor:
        return self._contents.tensors[self._places[name].name]

    def _data(self, name: str) -> Any:
        """Return the values of a tensor as the file has them, rows in the model's order."""
        entry, place = self._entry(name), self._places[name]
        data = entry.data if place.expert is None else entry.data[place.expert]
        if self._contents.architecture in _PERMUTED:
            heads = {"attn_q.": "head_count", "attn_k.": "head_count_kv"}
            for part, key in heads.items():
                if part in place.name:
                    default = self._contents.size("attention.head_count", per_layer=True)
                    count = self._contents.size(f"attention.{key}", default, per_layer=True)
                    return _halves(data, count)
        return data

    def _find(self, model: CheckpointModel) -> Iterator[tuple[str, _Place]]:
        gguf, tensors = require("gguf", "gguf"), self._contents.tensors
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(
            kinds[self._contents.architecture], self._contents.size("block_count")
        )
        for name in model.places():
            found = _EXPERT.search(name)
            shared = name if found is None else _EXPERT.sub(".experts.", name)
            theirs = names.get_name(shared, (".weight", ".bias"))
            expert = None if found is None else int(found[1])
            if theirs in tensors:
                yield name, _Place(theirs, expert)
            elif theirs is not None and expert is not None:  # files of early 2024
                single = theirs.replace("_exps.", f".{expert}.")
                if single in tensors:
                    yield name, _Place(single)

    def _check_kinds(self) -> None:
        """Raise CheckpointError for a type that is neither floating-point nor dequantized."""
        gguf, quants = require("gguf", "gguf"), require("gguf.quants")
        kinds = {
            place.name: self._contents.tensors[place.name].kind for place in self._places.values()
        }
        for kind in sorted({kind for kind in kinds.values() if kind.name not in _PLAIN}):
            try:
                quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError as error:
                name = next(name for name in kinds if kinds[name] == kind)
                raise CheckpointError(
                    f"{self.file} has the tensor {name} of type {kind.name}, which is not "
                    "supported for weights."
                ) from error

    def _methods(self) -> Iterator[tuple[str, LinearMethod]]:
        for name in self._places:
            format = self._entry(name).kind.name.lower()
            if name.endswith(".weight") and format in GGUF_BLOCKS:
                yield name.removesuffix(".weight"), BlockMethod(format)

    def _log_formats(self) -> None:
        kinds = Counter(self._entry(name).kind.name for name in self._places)
        kept = {*_PLAIN, *map(str.upper, GGUF_BLOCKS)}
        if others := {k: n for k, n in kinds.items() if k not in kept}:
            _log.warning(
                "%s: %s are dequantized while they are loaded: no kernel reads their format",
                self.file, ", ".join(f"{n} tensors of {k}" for k, n in others.items()),
            )  # fmt: skip


def _halves(data: Any, heads: int) -> Any:
    """Return the rows of queries or keys in the order of the two halves of a head.

    llama.cpp rotates neighboring values, and its converter interleaves the halves for that.
    """
    pairs = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)
