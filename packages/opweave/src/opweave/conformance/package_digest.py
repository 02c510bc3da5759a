"""A digest of the package that an implementation is from: it calls more than its own file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from opweave.conformance.modules import names_by_file
from opweave.ir import IrOpImpl

_KINDS = (".py", ".so", ".pyd")


def package_digest(impl: IrOpImpl) -> str | None:
    """Return a digest of the Python and native modules of its package; None: it is opweave's own.

    For a module outside a package, of the imported modules in its folder.
    """
    file, names = Path(impl.site.file), names_by_file()
    name = names.get(str(file), "")
    top = sys.modules.get(name.partition(".")[0])
    if name.partition(".")[0] == "opweave":
        return None
    if top is not None and hasattr(top, "__path__"):
        folder = Path(next(iter(top.__path__)))
        files: Iterable[Path] = (f for f in folder.rglob("*") if f.suffix in _KINDS)
    else:
        folder = file.parent
        files = (f for f in map(Path, names) if f.parent == folder)
    digest = hashlib.sha256()
    for each in sorted({file, *files}):
        if each.is_file():
            digest.update(f"{each.relative_to(folder)}\0".encode())
            digest.update(hashlib.sha256(each.read_bytes()).digest())
    return digest.hexdigest()
