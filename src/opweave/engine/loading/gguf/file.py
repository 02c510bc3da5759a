"""A GGUF file: metadata and tensors, read by the library ``gguf``.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from opweave.engine.dependencies import require
from opweave.engine.errors import CheckpointError

_MAGIC = b"GGUF"


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
class GgufFile:
    """The contents of a file.

    Attributes:
        path: of the file.
        metadata: values by key; a list for an array.
        tensors: the library's ``ReaderTensor`` by name; their data is mapped into memory.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The architecture as the file names it: also the prefix of the keys of its sizes."""
        found: str = self.get("general.architecture", str)
        return found

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the number *key* of the architecture, such as ``block_count``.

        Raises:
            CheckpointError: it is not a number, or it is missing and there is no default.
        """
        name = f"{self.architecture}.{key}"
        found = self.metadata.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            problem = f"has no {name}" if found is None else f"has {name}={str(found)[:80]}"
            raise CheckpointError(f"{self.path} {problem}; it must be a number.")
        return found

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of *key*, which must have the type *kind*.

        Raises:
            CheckpointError: it has another type, or it is missing and there is no default.
        """
        found = self.metadata.get(key, default)
        if not isinstance(found, kind):
            problem = f"has {key}={str(found)[:80]!r}" if found is not None else f"has no {key}"
            raise CheckpointError(f"{self.path} {problem}; it must be a {kind.__name__}.")
        return found


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors; a file that did not change is read once.

    Raises:
        CheckpointError: the file is damaged, cut short, or one of several parts.
        MissingDependencyError: the library ``gguf`` is not installed.
    """
    require("gguf", "gguf")
    state = path.stat()
    return _read(path.resolve(), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _reader_class(gguf: Any) -> Any:
    """Return the library's reader, which stops at the end of the file.

    The library itself reads empty values there, as many as a damaged length says.
    """

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *options: Any, **named: Any) -> Any:
            found = super()._get(offset, dtype, count, *options, **named)
            if len(found) < int(count):
                raise ValueError(f"a value at byte {offset} is not complete")
            return found

    return Reader


@lru_cache(maxsize=2)
def _read(path: Path, changed: int, size: int) -> GgufFile:
    gguf = require("gguf", "gguf")
    try:
        reader = _reader_class(gguf)(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        ends = [int(t.data_offset) + int(t.n_bytes) for t in reader.tensors]
        if max(ends, default=0) > size:
            raise ValueError(f"its tensors end at byte {max(ends)}, but it has {size}")
    except Exception as error:  # the library does not check numbers: any error can follow
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} is damaged, cut short, or not a GGUF file ({why}). Download or copy it again."
        ) from error
    # The library keeps an array for each string; without them, a vocabulary takes little memory.
    reader.fields.clear()
    if (parts := metadata.get("split.count", 1)) > 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts of a model, which are not supported. Merge them "
            "with: llama-gguf-split --merge."
        )
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
