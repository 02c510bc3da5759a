"""Environment variables with vLLM's names, for packages that read them.

They do not configure opweave, which has variables of its own. A package adds its variables to
:data:`environment_variables`, as in vLLM.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opweave.ir.errors import did_you_mean

__all__ = ["environment_variables", "is_set"]


def _flag(name: str, default: str = "0") -> Callable[[], bool]:
    return lambda: os.environ.get(name, default).strip().lower() in ("1", "true")


def _text(name: str, default: str) -> Callable[[], str]:
    return lambda: os.environ.get(name, default)


def _batch_invariant() -> bool:
    names = ("VLLM_BATCH_INVARIANT", "OPWEAVE_BATCH_INVARIANT")
    return any(_flag(name)() for name in names)


environment_variables: dict[str, Callable[[], Any]] = {
    "VLLM_BATCH_INVARIANT": _batch_invariant,
    "VLLM_CACHE_ROOT": _text("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm")),
    "VLLM_CONFIGURE_LOGGING": _flag("VLLM_CONFIGURE_LOGGING", "1"),
    "VLLM_DISABLE_COMPILE_CACHE": _flag("VLLM_DISABLE_COMPILE_CACHE"),
    "VLLM_LOGGING_LEVEL": lambda: _text("VLLM_LOGGING_LEVEL", "INFO")().upper(),
    "VLLM_PLUGINS": lambda: _list("VLLM_PLUGINS"),
    "VLLM_TARGET_DEVICE": lambda: _text("VLLM_TARGET_DEVICE", "cuda")().lower(),
    "VLLM_USE_V1": lambda: True,  # the only engine of later versions
}
"""Functions that read the variables, by name."""


def is_set(name: str) -> bool:
    """Return whether the environment contains a variable of :data:`environment_variables`."""
    if name not in environment_variables:
        raise AttributeError(_unknown(name))
    return name in os.environ


def _list(name: str) -> list[str] | None:
    text = os.environ.get(name)
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _unknown(name: str) -> str:
    return (
        f"opweave does not know the variable {name!r} of vLLM's envs. "
        f"{did_you_mean(name, environment_variables)} Read os.environ instead, or add a function "
        "to envs.environment_variables."
    )


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    read = environment_variables.get(name)
    if read is None:
        raise AttributeError(_unknown(name))
    return read()


def __dir__() -> list[str]:
    return sorted({*__all__, *environment_variables})
