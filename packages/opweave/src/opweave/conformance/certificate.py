"""Certificates: results of verification, with digests of the sources and versions."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from opweave import native
from opweave.base.site import Site
from opweave.conformance.checks import CHECKS
from opweave.conformance.modules import names_by_file
from opweave.conformance.package_digest import package_digest
from opweave.conformance.verify import Result

_FORMAT = 1


def certificate(results: Sequence[Result], *, seed: int) -> dict[str, Any]:
    """Return the certificate as plain data, ready for JSON.

    ``source`` is a digest of the files of an implementation and its predicate, ``definition`` of
    the native implementation, and ``package`` of all modules of the implementation's package. If a
    digest no longer matches, the certificate does not apply. ``native_module`` is a digest of
    opweave's compiled module.
    """
    return {
        "format": _FORMAT,
        "versions": {
            "opweave": version("opweave"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "isa": native.status().isa,
            "accelerator": _accelerator(results),
        },
        "native_module": _native_digest(),
        "seed": seed,
        "summary": summary(results),
        "results": [_result(result) for result in results],
    }


def summary(results: Sequence[Result]) -> dict[str, int]:
    """Count the implementations that passed, failed and could not be verified."""
    statuses = [result.status for result in results]
    return {status: statuses.count(status) for status in ("passed", "failed", "unverified")}


def _result(result: Result) -> dict[str, Any]:
    subject = result.subject
    return {
        "op": subject.op.name,
        "provider": subject.provider,
        "device": subject.device,
        "status": result.status,
        "reason": result.obstacle or None,
        "traits": sorted(subject.impl.traits),
        "registered": _place(subject.impl.site),
        "source": subject.impl.uuid(),
        "package": package_digest(subject.impl),
        "owner": None if subject.impl.owner is None else asdict(subject.impl.owner),
        "inputs": {name: _plain(value) for name, value in subject.options},
        "definition": subject.op.impls["native"].uuid(),
        "seconds": round(result.seconds, 3),
        "checks": [
            {
                "check": outcome.check,
                "promise": CHECKS[outcome.check].promise,
                "status": outcome.status,
                "cases": outcome.passed + len(outcome.problems),
                "problems": outcome.problems,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in result.outcomes
        ],
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int)) else str(value)


def _place(site: Site) -> str:
    """Return the module and the line, without folders of this machine."""
    return f"{names_by_file().get(site.file, Path(site.file).name)}:{site.line}"


def _accelerator(results: Sequence[Result]) -> str | None:
    if any(result.subject.device == "cuda" for result in results):
        return torch.cuda.get_device_name()
    return None


def _native_digest() -> str | None:
    path = native.status().path
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
