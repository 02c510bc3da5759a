"""Global state: a call leaves torch's settings and random numbers as they were."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opweave.conformance import inputs
from opweave.conformance.case import Case
from opweave.conformance.check import Check, Finding, each
from opweave.conformance.memory import copied
from opweave.conformance.subject import Subject

_STATE: Mapping[str, Callable[[], Any]] = {
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": torch.get_default_device,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.is_autocast_enabled()": torch.is_autocast_enabled,
    "the state of torch's random numbers": lambda: bytes(torch.get_rng_state().numpy()),
    "the state of Python's random numbers": random.getstate,
    "os.environ": lambda: dict(os.environ),
}


def _leaves_alone(subject: Subject, case: Case) -> Finding:
    values = copied(case.values)
    before = {name: get() for name, get in _STATE.items()}
    subject.run(values)
    changed = [name for name, get in _STATE.items() if get() != before[name]]
    return f"changed {' and '.join(changed)}" if changed else None


CHECK = Check(
    "global_state",
    "torch's settings and random numbers, and the environment, are left alone",
    each(inputs.usual, _leaves_alone),
)
