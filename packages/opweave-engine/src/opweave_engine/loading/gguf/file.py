"""A GGUF file: metadata and tensors, mapped into memory.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The checks are those of
llama.cpp's reader.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opweave_engine.dependencies import require
from opweave_engine.errors import CheckpointError
from opweave_engine.loading.gguf.keys import unread_keys
from opweave_engine.models import UnsupportedModelError
from opweave_engine.models.weights import shown_name

_log = logging.getLogger(__name__)

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Types of values by their number in the file, as struct and numpy name them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")  # of a text, before its bytes
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_KINDS = {int: "an integer", float: "a number", str: "a text"}


def is_gguf(path: Path) -> bool:
    """Return whether *path* is a GGUF file, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        kind: the library's ``GGMLQuantizationType``.
        shape: rows first, as in torch.
        data: the values, mapped into memory; the bytes of each row for other types than F16, F32
            and F64.
    """

    kind: Any
    shape: tuple[int, ...]
    data: NDArray[Any]


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file.

    Attributes:
        path: of the file.
        metadata: values by key: a list for an array of texts, a numpy array for one of numbers.
        tensors: by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The architecture as the file names it: also the prefix of the keys of its sizes."""
        name: str = self.get("general.architecture", str)
        return name

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the number *key* of the architecture, such as ``rope.freq_base``.

        Raises:
            CheckpointError: it is not a finite number, or it is missing without a default.
        """
        value = self.get(f"{self.architecture}.{key}", float, default)
        if not math.isfinite(value):
            raise CheckpointError(f"{self.path} has {self.architecture}.{key}={value}.")
        return value

    def size(self, key: str, default: int | None = None, *, per_layer: bool = False) -> int:
        """Return the integer *key* of the architecture, such as ``block_count``.

        Args:
            key: without the prefix.
            default: for files without the key.
            per_layer: whether the file may have an array with an integer for each layer.

        Raises:
            CheckpointError: it is not an integer, or it is missing without a default.
            UnsupportedModelError: layers have different integers.
        """
        name = f"{self.architecture}.{key}"
        values = self.metadata.get(name)
        if not per_layer or not isinstance(values, np.ndarray):
            size: int = self.get(name, int, default)
            return size
        layers = self.size("block_count")
        if values.dtype.kind not in "iu" or len(values) != layers or not layers:
            raise CheckpointError(
                f"{self.path} has an array {name} of {len(values)} values of type {values.dtype}; "
                f"it must have an integer for each of the {layers} layers."
            )
        if (values != values[0]).any():
            raise UnsupportedModelError(
                f"{self.path} has {name} with different values for different layers, from "
                f"{values.min()} to {values.max()}, which is not supported."
            )
        return int(values[0])

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of *key*, which must have the type *kind*; an integer is a float, too.

        Raises:
            CheckpointError: it has another type, or it is missing and there is no default.
        """
        value = self.metadata.get(key, default)
        kinds = int | float if kind is float else kind
        if not isinstance(value, kinds) or isinstance(value, bool):
            problem = f"has {key}={str(value)[:80]!r}" if value is not None else f"has no {key}"
            raise CheckpointError(f"{self.path} {problem}; it must be {_KINDS[kind]}.")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors; a file that did not change is read once.

    Raises:
        CheckpointError: the file is damaged, cut short, or one of several parts.
        MissingDependencyError: the library ``gguf`` is not installed.
    """
    require("gguf", "gguf")
    state = path.stat()
    return _read(path.resolve(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read(path: Path, changed: int, size: int) -> GgufFile:
    try:
        file = _contents(path)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is damaged, cut short, or not a GGUF file ({why}). Download or copy it again."
        ) from error
    if (parts := file.get("split.count", int, 1)) > 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts of a model, which are not supported. Merge them "
            "with: llama-gguf-split --merge."
        )
    if unread := unread_keys(file.architecture, file.metadata):
        _log.warning(
            "%s: these keys are not supported and are ignored, although they may change what the "
            "model computes: %s",
            path, ", ".join([*map(shown_name, unread[:8]), *["…"] * (len(unread) > 8)]),
        )  # fmt: skip
    return file


def _contents(path: Path) -> GgufFile:
    """Read the file.

    Raises:
        ValueError: it is not valid.
        CheckpointError: it is of a kind that is not supported.
    """
    cursor = _Cursor(np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray))
    if bytes(cursor.numbers("B", len(_MAGIC))) != _MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    version = cursor.number("I")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path} is big-endian, which is not supported. Convert it with: "
            f"gguf-convert-endian {path} little."
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} has version {version} of the format. Supported: 2, 3. Convert the model again."
        )
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it has the key {key!r} twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={str(alignment)[:80]} is not a power of two")
    return GgufFile(path, metadata, _tensors(cursor, tensor_count, alignment))


class _Cursor:
    """Reads values one after the other, and none past the end of the file.

    Attributes:
        data: the bytes of the file.
        at: the position of the next byte.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.at = data, 0
        self._bytes = data.data

    def numbers(self, form: str, count: int) -> NDArray[Any]:
        """Return an array that is mapped into memory."""
        dtype = np.dtype(form).newbyteorder("<")
        end = self.at + count * dtype.itemsize
        if end > len(self.data):
            raise ValueError(f"a value at byte {self.at} is not complete")
        values = self.data[self.at : end].view(dtype)
        self.at = end
        return values

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0].item()

    def texts(self, count: int) -> list[str]:
        at, end, source, texts = self.at, len(self.data), self._bytes, []
        if count * _LENGTH.size > end - at:
            raise ValueError(f"a value at byte {at} is not complete")
        for _ in range(count):
            start = at + _LENGTH.size
            if start > end or (at := start + _LENGTH.unpack_from(source, at)[0]) > end:
                raise ValueError(f"a value at byte {start} is not complete")
            texts.append(str(source[start:at], "utf-8"))
        self.at = at
        return texts

    def text(self) -> str:
        return self.texts(1)[0]

    def value(self, key: str) -> Any:
        kind = self.number("I")
        is_array = kind == _ARRAY
        kind, count = (self.number("I"), self.number("Q")) if is_array else (kind, 1)
        if kind == _STRING:
            return self.texts(count) if is_array else self.text()
        if kind not in _NUMBERS:
            subject = "an array of type" if is_array else "the type"
            raise ValueError(f"{key!r} has {subject} {kind}, which is unknown or not supported")
        values = self.numbers(_NUMBERS[kind], count)
        if kind == _BOOL:
            values = values != 0  # any other byte is true
        return values if is_array else values[0].item()


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Read the table of tensors, which lie in its order, each at the next aligned position."""
    gguf = require("gguf", "gguf")
    places: dict[str, tuple[Any, tuple[int, ...], int, int]] = {}
    end = 0
    for _ in range(count):
        name, dimensions = cursor.text(), cursor.number("I")
        if name in places:
            raise ValueError(f"it has the tensor {name!r} twice")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(cursor.numbers("Q", dimensions).tolist()))
        number, offset = cursor.number("I"), cursor.number("Q")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"the tensor {name!r} has the unknown type {number}") from None
        values, size = gguf.GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % values:
            raise ValueError(
                f"rows of {shape[-1]} values in {name!r} are not blocks of {kind.name}"
            )
        start = -(-end // alignment) * alignment
        if offset != start:
            raise ValueError(
                f"the tensor {name!r} is at byte {offset} of the data, but must be at {start}: "
                "where the one before it ends, aligned"
            )
        end = start + math.prod(shape) // values * size
        places[name] = (kind, shape, start, end)
    begin = -(-cursor.at // alignment) * alignment
    if begin + end > len(cursor.data) and places:
        raise ValueError(f"its tensors end at byte {begin + end}, but it has {len(cursor.data)}")
    tensors = {}
    for name, (kind, shape, start, end) in places.items():
        data = cursor.data[begin + start : begin + end]
        if kind.name in _FLOATS:
            data = data.view(_FLOATS[kind.name]).reshape(shape)
        else:
            data = data.reshape(*shape[:-1], -1) if data.size else data
        tensors[name] = GgufTensor(kind, shape, data)
    return tensors
