"""Functions of kernel libraries, imported at the first call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from opweave.base.packages import folders_of, is_installed
from opweave.ir.errors import InvalidOpError

Function = Callable[..., Any]


@dataclass(frozen=True)
class ModuleFunction:
    """A function of an installed package.

    Attributes:
        name: the module and the function, such as ``"package.module:function"``.
    """

    name: str

    def __post_init__(self) -> None:
        module, colon, path = self.name.partition(":")
        parts = (*module.split("."), *path.split("."))
        if not (colon and all(part.isidentifier() for part in parts)):
            raise InvalidOpError(
                f"{self.name!r} does not name a function, as 'package.module:function' does."
            )

    def obstacle(self) -> str | None:
        package = self.name.partition(":")[0].partition(".")[0]
        return None if is_installed(package) else f"{package} is not installed"

    def file(self) -> Path | None:
        """Return the file of the module, without importing it; None if it does not exist."""
        module, _, _ = self.name.partition(":")
        package, *rest = module.split(".")
        for folder in folders_of(package):
            path = folder.joinpath(*rest)
            for file in (path / "__init__.py", path.with_suffix(".py")):
                if file.is_file():
                    return file
        return None

    def load(self) -> Function:
        module, _, path = self.name.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return cast(Function, found)


@dataclass(frozen=True)
class FunctionByArgument:
    """A function of an installed package that is chosen by the value of an argument.

    Attributes:
        parameter: the op's parameter.
        functions: the function for each value, as ``"package.module:function"``.
    """

    parameter: str
    functions: Mapping[object, str]

    def named(self) -> list[ModuleFunction]:
        return [ModuleFunction(name) for name in self.functions.values()]

    def obstacle(self) -> str | None:
        return next(filter(None, (each.obstacle() for each in self.named())), None)

    def load(self) -> dict[object, Function]:
        loaded = (each.load() for each in self.named())
        return dict(zip(self.functions, loaded, strict=True))


@dataclass(frozen=True)
class HubKernel:
    """A function of a kernel repository of Hugging Face, in the layout of its package ``kernels``.

    Give a version, a revision or a lock file with a repository's name, so that later changes of the
    repository cannot change what runs.

    Attributes:
        repository: the repository's name, or the path of a local one.
        name: the function.
        version, revision: the version or revision of the repository.
        lockfile: a ``kernels.lock``, written by ``kernels lock``.
        trust_remote_code: load the kernel even if ``kernels`` does not trust its publisher.
    """

    repository: str | Path
    name: str
    version: int | None = None
    revision: str | None = None
    lockfile: Path | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        pins = [self.version, self.revision, self.lockfile]
        given = sum(pin is not None for pin in pins)
        if given != (0 if isinstance(self.repository, Path) else 1):
            raise InvalidOpError(
                f"HubKernel({self.repository!r}, {self.name!r}): give one of version=, revision= "
                "and lockfile= with a repository's name, and none with a Path."
            )

    def obstacle(self) -> str | None:
        if not is_installed("kernels"):
            return "kernels is not installed: pip install kernels"
        if isinstance(self.repository, Path) and not self.repository.is_dir():
            return f"{self.repository} is not a folder"
        return None

    def load(self) -> Function:
        import kernels

        if isinstance(self.repository, Path):
            module = kernels.get_local_kernel(self.repository)
        elif self.lockfile is not None:
            module = kernels.get_locked_kernel(
                self.repository, lockfile=self.lockfile, trust_remote_code=self.trust_remote_code
            )
        else:
            module = kernels.get_kernel(
                self.repository,
                version=self.version,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
            )
        return cast(Function, getattr(module, self.name))
