"""Find implementations to verify, import their modules and digest their sources."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opweave import platforms
from opweave.conformance.inputs import options_of
from opweave.conformance.subject import (
    FAILURES,
    ModuleImportError,
    NothingToVerifyError,
    Subject,
    UnknownInputError,
    UnknownPlatformError,
)
from opweave.ir import IrOpImpl, current_registry
from opweave.ir.errors import OpweaveError, did_you_mean
from opweave.ir.priority import base_of

# The modules that register what is to be verified.


def import_named(option: str, name: str) -> None:
    """Import the module *name*, for the option *option*.

    Raises:
        ModuleImportError: the name is not valid, or the module is missing or raises.
    """
    if not all(name.split(".")) or "/" in name or "\\" in name:
        raise ModuleImportError(
            f"{option} {name!r} is not the name of a module; write it as an import statement does, "
            "such as my_kernels or package.my_kernels."
        )
    try:
        importlib.import_module(name)
    except FAILURES as error:
        raise ModuleImportError(f"{option} {name!r} failed: {_error_line(error)}.") from error


def names_by_file() -> dict[str, str]:
    """Return the names of the modules that are imported, by their files."""
    return {
        file: name
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (file := vars(module).get("__file__"))
    }


def _error_line(error: BaseException) -> str:
    """Return what was raised and where, in one line."""
    text = " ".join(str(error).split()).rstrip(".")
    kind = "" if isinstance(error, ImportError) and text else type(error).__name__
    summary = ": ".join(filter(None, (kind, text)))
    # The message of a SyntaxError names the file and the line.
    place = "" if isinstance(error, SyntaxError) else _place(error)
    return f"{summary} at {place}" if place else summary


def _place(error: BaseException) -> str:
    """Return the file and the line, or nothing if the module was not even found.

    Only frames in the module's own folder count: the user cannot fix others.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    inside = [f for f in ours if Path(f.filename).is_relative_to(Path(ours[0].filename).parent)]
    return f"{inside[-1].filename}:{inside[-1].lineno}" if inside else ""


# A digest of the package that an implementation is from: it calls more than its own file.


_MODULE_SUFFIXES = (".py", ".so", ".pyd")


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
        files: Iterable[Path] = (f for f in folder.rglob("*") if f.suffix in _MODULE_SUFFIXES)
    else:
        folder = file.parent
        files = (f for f in map(Path, names) if f.parent == folder)
    digest = hashlib.sha256()
    for path in sorted({file, *files}):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def origin_of(subject: Subject) -> dict[str, Any]:
    """Return facts about an implementation that is registered in this process, for JSON."""
    impl, names = subject.impl, names_by_file()
    # The module, or the name of its file: no folders of this machine.
    module = names.get(impl.site.file, Path(impl.site.file).name)
    return {
        "op": subject.op.name,
        "provider": subject.provider,
        "device": subject.device,
        "traits": sorted(impl.traits),
        "registered": f"{module}:{impl.site.line}",
        "source": impl.uuid(),
        "package": package_digest(impl),
        "owner": None if impl.owner is None else asdict(impl.owner),
    }


def serve(connection: Connection) -> None:
    """Send the implementations that a process would verify, or why it found none, as JSON."""
    modules, ops, providers, platform = connection.recv()
    try:
        for module in modules:
            import_named("--import", module)
        matching = subjects(ops, providers, platform)
        # Names of providers that were imported as modules are imported again.
        modules += tuple(base_of(p) for p in providers if base_of(p) in sys.modules)
        answer: Any = [{**origin_of(s), "modules": modules} for s in matching]
    except OpweaveError as error:
        answer = f"{error}"
    connection.send_bytes(json.dumps(answer).encode())


# Finds implementations to verify by op, provider and platform, including other packages'.


def subjects(
    ops: Sequence[str] = (), providers: Sequence[str] = (), platform: str | None = None
) -> list[Subject]:
    """Return the registered implementations of these ops from these providers, or all.

    The name of a provider that is not registered is imported as a module, which may register it.

    Args:
        ops: names of ops; dashes count as underscores.
        providers: names of providers; all values of their tunable parameters, unless the name
            contains some.
        platform: the device family to verify on; by default that of this process.

    Raises:
        UnknownOpError: an op does not exist.
        ModuleImportError: the module of a provider raises.
        NothingToVerifyError: nothing is registered from a provider, or not for the ops.
        UnknownPlatformError: the platform does not exist, or its device is missing.
    """
    device = _device(platform)
    for provider in providers:
        _ensure_registered(provider)
    registry = current_registry()
    chosen = [registry.op(name.replace("-", "_")) for name in ops] or list(registry.ops.values())
    matching = [
        Subject(op, provider, device)
        for op in dict.fromkeys(chosen)
        for provider in op.impls
        if not providers or not {provider, base_of(provider)}.isdisjoint(providers)
    ]
    if not matching:
        listed = ", ".join(op.name for op in chosen)
        raise NothingToVerifyError(f"no implementation from {', '.join(providers)} for {listed}.")
    return matching


def subject_named(op: str, provider: str) -> Subject:
    """Return one implementation; raise as :func:`subjects` does if it does not exist."""
    return next(s for s in subjects([op], [provider]) if s.provider == provider)


def with_inputs(
    implementations: Sequence[Subject], texts: Sequence[str], option: str = "--input"
) -> list[Subject]:
    """Return the subjects with options of their ops' input generators, written as ``NAME=VALUE``.

    Ops whose generator does not have an option are verified without it.

    Raises:
        UnknownInputError: no generator has the option, or accepts its value.
    """
    changed = list(implementations)
    for text in texts:
        name, _, value = text.partition("=")
        names = {key for subject in changed for key in _defaults(subject)}
        if name not in names:
            raise UnknownInputError(
                f"{option} {text!r}: no input generator of these ops has an option {name!r}. "
                f"{did_you_mean(name, names)}"
            )
        for i, subject in enumerate(changed):
            default = _defaults(subject).get(name)
            if default is not None:
                number = _number(f"{option} {text!r}", value, default)
                changed[i] = replace(subject, options=(*subject.options, (name, number)))
    return changed


def _defaults(subject: Subject) -> dict[str, int | bool]:
    """Return the numbers and switches among the options of the input generator."""
    options = options_of(subject) if subject.op.has_input_generator else {}
    return {name: default for name, default in options.items() if isinstance(default, int)}


def _number(text: str, value: str, default: int | bool) -> int | bool:
    words = {"true": True, "false": False}
    if isinstance(default, bool) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(default, bool) and value.isdecimal():
        return int(value)
    kind = "true or false" if isinstance(default, bool) else "a number of at least 0"
    raise UnknownInputError(f"{text}: it should be {kind}, as its default {default}.")


def _ensure_registered(provider: str) -> None:
    if provider in _providers():
        return
    module = base_of(provider)
    if module.isidentifier() and importlib.util.find_spec(module) is not None:
        import_named("--provider", module)
    providers = _providers()
    if provider not in providers:
        hint = did_you_mean(provider, providers)
        raise NothingToVerifyError(
            f"no implementation from {provider!r} is registered. {hint} "
            "Import the package that registers it (opweave verify --import, pytest -p)."
        )


def _providers() -> set[str]:
    return {provider for op in list(current_registry().ops.values()) for provider in op.impls}


def _device(name: str | None) -> str:
    if name is None:
        return platforms.current_platform.device_type
    from opweave.conformance.platform.subject import find_platform

    device = find_platform(name).platform.device_type
    if device != "cpu" and not torch.get_device_module(device).is_available():
        raise UnknownPlatformError(f"platform {name!r}: torch finds no {device} device here.")
    return device
