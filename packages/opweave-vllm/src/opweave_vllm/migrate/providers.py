"""The provider and the device of the kernel that a method calls."""

from __future__ import annotations

import ast
from collections.abc import Set

from opweave_vllm.migrate.imports import imports_of
from opweave_vllm.migrate.names import provider_name
from opweave_vllm.migrate.rewrite import Rewritten
from opweave_vllm.migrate.source import SourceModule
from opweave_vllm.migrate.syntax import Function, attribute_of_self, dotted, names_in

_DEVICES = {"torch_npu": "npu", "torch_xla": "xla", "torch_musa": "musa"}
_NO_PROVIDER = frozenset(
    {"torch", "typing", "math", "vllm", "os", "functools", "collections", "opweave"}
)


def guess_provider(
    method: str,
    function: Function,
    body: Rewritten,
    source: SourceModule,
    device: str,
    taken: Set[str],
) -> tuple[str, str]:
    """Return a new provider name for the kernel that *function* calls, and its device.

    The name is the package or the torch op namespace that the method uses, else the module.
    """
    packages = [*_packages(function, source), *_namespaces(function, body)]
    provider = provider_name(next(iter(packages), source.path.stem))
    kind = device or next((_DEVICES[p] for p in packages if p in _DEVICES), "privateuseone")
    if provider in taken:
        provider = f"{provider}_{method.removeprefix('forward_')}"
    return provider, kind


def _packages(function: Function, source: SourceModule) -> list[str]:
    used = set(names_in(function))
    imports = source.imports | imports_of(function)
    found = dict.fromkeys(_provider_of(full) for name, full in imports.items() if name in used)
    return [name for name in found if name and name not in _NO_PROVIDER]


def _provider_of(module: str) -> str:
    if module.startswith("vllm.") and "._" in module:  # vllm._custom_ops, vllm._ipex_ops
        kind = module.split("._")[1].partition("_ops")[0]
        return "vllm_c" if kind == "custom" else kind
    return module.lstrip(".").partition(".")[0].lower()


def _namespaces(function: Function, body: Rewritten) -> list[str]:
    """Return the namespaces of torch's ops that a method calls, itself or through ``self``."""
    found: dict[str, None] = {}
    for node in ast.walk(function):
        kernel = body.replacements.get(attribute_of_self(node), "")
        text = kernel or (dotted(node) if isinstance(node, ast.Attribute) else "")
        if text.startswith("torch.ops.") and text.count(".") == 3:
            namespace = text.split(".")[2]
            found["vllm_c" if namespace == "_C" else namespace.strip("_").lower()] = None
    return list(found)
