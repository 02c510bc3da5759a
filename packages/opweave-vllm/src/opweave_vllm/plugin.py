"""The entry point: register the chosen seams with vLLM."""

import importlib
import os

from opweave import __version__
from opweave.config.environment import declare_variable, declared
from opweave_vllm import reporting

SEAMS = ("norms", "activations", "rotary", "linear", "attention", "experts", "ir")
VARIABLE = "OPWEAVE_VLLM_SEAMS"

_registered = False


class SeamError(ValueError):
    """The environment variable names an unknown seam."""


def chosen_seams() -> tuple[str, ...]:
    """Return the seams to register; none where the variable is not set.

    Raises:
        SeamError: ``OPWEAVE_VLLM_SEAMS`` names an unknown seam.
    """
    # The package is also installed for its other parts, so nothing is replaced by default.
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if names == ["all"]:
        return SEAMS
    if names == ["none"]:
        return ()
    for name in names:
        if name not in SEAMS:
            accepted = ", ".join(SEAMS)
            raise SeamError(
                f"unknown seam {name!r} in {VARIABLE}; use 'all', 'none' or some of {accepted}"
            )
    return tuple(dict.fromkeys(names))


def register() -> None:
    """Register the chosen seams; vLLM calls this in every process before it builds a model."""
    global _registered
    _declare_variables()
    seams = chosen_seams()
    if not seams:
        return
    reporting.start()  # also in a worker that was forked after the registration
    if _registered:
        return
    _registered = True
    _enter_cache_key(seams)
    for seam in seams:
        module = "providers" if seam == "ir" else seam
        importlib.import_module(f"opweave_vllm.{module}").register()


def _declare_variables() -> None:
    """Make the variables known to opweave, which warns of others that begin with OPWEAVE."""
    for name, doc in (
        (VARIABLE, "The seams of vLLM that call opweave's ops, separated by commas."),
        (reporting.VARIABLE, "With 1, print the kernels that ran in vLLM's processes."),
    ):
        if name not in declared:
            declare_variable(name, str, "", doc)


def _enter_cache_key(seams: tuple[str, ...]) -> None:
    """Make the seams part of the key of vLLM's compile cache.

    vLLM loads a graph that it compiled before if its configuration and environment are the same.
    """
    from vllm import envs

    key = f"{__version__} {','.join(seams)}"
    envs.environment_variables[VARIABLE] = lambda: key
