"""The tensors of a quantized checkpoint, matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from opweave.layers.linear import LinearMethod
from opweave_engine.loading.checkpoint import TensorFile
from opweave_engine.loading.dtypes import shapes_of
from opweave_engine.loading.quantized.matrix import QuantizedMatrix, Tensors


class Format(Protocol):
    """How checkpoints of a kind store their matrices.

    Attributes:
        main: the last parts of names, of which each quantized module has one.
        leaves: of all tensors that belong to a quantized matrix.
        values_needed: of tensors whose values decide how a layer keeps the matrix.
        notes: what of the configuration is not followed, for the log.
    """

    @property
    def main(self) -> Sequence[str]: ...
    @property
    def leaves(self) -> Sequence[str]: ...
    @property
    def values_needed(self) -> Sequence[str]: ...
    @property
    def notes(self) -> Sequence[str]: ...

    def matrix(self, module: str, tensors: Tensors) -> QuantizedMatrix:
        """Return the matrix of *module*; without values, for tensors on the device "meta".

        Raises:
            CheckpointError: tensors are missing or do not fit each other.
        """


class QuantizedFiles:
    """A checkpoint's files: a :class:`~opweave_engine.loading.sources.QuantizedSource`.

    Args:
        files: open.
        form: how they store matrices.

    Raises:
        CheckpointError: tensors are missing or do not fit each other.
    """

    def __init__(self, files: Sequence[TensorFile], form: Format) -> None:
        self._form = form
        shapes_of(files)  # each tensor is in one file only
        self._files = {name: file for file in files for name in file.shapes()}
        self._dtypes = {name: dtype for file in files for name, dtype in file.dtypes().items()}
        self._modules = self._find()
        self.file: Path = files[0].file
        known = {n: s for file in files for n, s in file.shapes().items()}
        planned = {
            module: form.matrix(module, self._planned(names, known))
            for module, names in self._modules.items()
        }
        self.methods: Mapping[str, LinearMethod] = {
            module: matrix.method for module, matrix in planned.items() if matrix.method is not None
        }
        used = {name for names in self._modules.values() for name in names.values()}
        self._shapes = {name: shape for name, shape in known.items() if name not in used}
        self._shapes |= {f"{module}.weight": matrix.shape for module, matrix in planned.items()}

    @property
    def num_dense(self) -> int:
        """The number of quantized matrices that no layer keeps quantized."""
        return len(self._modules) - len(self.methods)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def tensor(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in self._modules:
            return self._matrix(module).values()
        return self._files[name].tensor(name)

    def parameters(self, module: str, method: LinearMethod) -> dict[str, Tensor]:
        return self._matrix(module).parameters_for(method)

    def _matrix(self, module: str) -> QuantizedMatrix:
        names = self._modules[module]
        tensors = {leaf: self._files[name].tensor(name) for leaf, name in names.items()}
        return self._form.matrix(module, tensors)

    def _find(self) -> dict[str, dict[str, str]]:
        """Return the tensors of each quantized module, by the last part of their names."""
        found: dict[str, dict[str, str]] = {}
        for name, dtype in self._dtypes.items():
            module, leaf = _split(name)
            is_narrow = leaf == "weight" and dtype in ("I8", "F8_E4M3")
            if leaf in self._form.main or is_narrow:
                found[module] = {}
        for name in self._dtypes:
            module, leaf = _split(name)
            if module in found and leaf in self._form.leaves:
                found[module][leaf] = name
        return found

    def _planned(
        self, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return tensors without values, where those are not needed."""
        return {
            leaf: self._files[name].tensor(name)
            if leaf in self._form.values_needed
            else torch.empty(shapes[name], dtype=_TORCH[self._dtypes[name]], device="meta")
            for leaf, name in names.items()
        }


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and its name there, such as ``weight.absmax``."""
    module, dot, leaf = name.partition(".weight.")
    if dot:
        return module, f"weight.{leaf}"
    module, _, leaf = name.rpartition(".")
    return module, leaf


_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
