"""The one definition of a plain call: may torch's dispatcher be skipped?

A call is *plain* if the dispatcher would do nothing but run the kernel: every tensor is exactly a
``torch.Tensor`` or ``Parameter``, nothing in this thread has to see the call (a mode, a functorch
transform, a tracer), autocast is off, and autograd records nothing. A missed fact is a silently
wrong gradient or trace, so the facts are listed once, in :data:`FACTS`. The generated fast paths
(:mod:`opweave.ir.codegen`), the functions below and the keys that the C++ check reads
(``csrc/core/plain_call.cpp``) all come from that list. ``tests/base/test_plain_call.py`` draws
states of a thread and checks that all of them agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from opweave import torch_compat

PLAIN_TYPES = frozenset({Tensor, Parameter})
"""The exact types of tensors that have no behavior of their own."""


class Fact(NamedTuple):
    """A mode, transform or other state of a thread that affects its torch calls.

    Attributes:
        name: the name of the state.
        inactive: a Python expression over :data:`NAMES` that is true while the state is inactive.
        dispatch_key: the dispatch key that the thread includes while the state is active, if any.
            The C++ check tests these keys.
        in_native_check: whether the C++ check covers the state.
    """

    name: str
    inactive: str
    dispatch_key: str | None = None
    in_native_check: bool = True


FUNCTION_MODE = Fact("function mode", "not _function_mode_enabled()")
DISPATCH_MODE = Fact("dispatch mode", "_dispatch_mode_count() == 0", "Python")
FUNCTORCH = Fact(
    "functorch transform", "_functorch_interpreter() is None", "FuncTorchDynamicLayerFrontMode"
)
TRACER = Fact("torch.jit tracer", "_jit_tracing_state() is None", "Tracer")
FORWARD_AD = Fact("forward-mode AD", "_forward_ad._current_level < 0", in_native_check=False)
AUTOCAST = Fact("autocast", "not _autocasts()", in_native_check=False)

WATCHERS = (FUNCTION_MODE, DISPATCH_MODE, FUNCTORCH, TRACER)
"""Facts about code that sees every torch call, and may replace it."""
FACTS = (*WATCHERS, FORWARD_AD, AUTOCAST)
"""Facts that exclude plain calls in a thread. Grad mode also depends on the tensors."""

NAMES: dict[str, Any] = {
    "_function_mode_enabled": torch_compat.function_mode_enabled,
    "_dispatch_mode_count": torch_compat.dispatch_mode_count,
    "_functorch_interpreter": torch_compat.functorch_interpreter,
    "_jit_tracing_state": torch_compat.jit_tracing_state,
    "_forward_ad": torch_compat.FORWARD_AD,
    "_autocasts": torch_compat.any_autocast_enabled,
}
"""The names in the expressions of the facts."""

MODE_KEYS = tuple(
    torch_compat.dispatch_key(f.dispatch_key) for f in FACTS if f.dispatch_key is not None
)
"""The dispatch keys of the facts, as numbers."""


def _any_active(facts: Iterable[Fact]) -> Callable[[], bool]:
    """Compile the function that returns whether one of *facts* is active."""
    source = f"lambda: not ({' and '.join(fact.inactive for fact in facts)})"
    function: Callable[[], bool] = eval(source, dict(NAMES))
    return function


is_watched = _any_active(WATCHERS)
"""Whether a mode, a functorch transform or a tracer in this thread has to see torch calls."""

hides_values = _any_active((DISPATCH_MODE, FUNCTORCH, TRACER))
"""Whether tensors in this thread may have no values to read, or none that a trace may depend on.

Function modes are not among these: ``torch.device("cpu")`` is one, and hides nothing.
"""

kernels_are_traced: Callable[[], int] = torch_compat.dispatch_mode_count
"""Whether the calls that a kernel makes have to be seen: below the dispatcher, only modes remain.

All other facts are handled before a kernel runs. It is asked in every call of a kernel.
"""


def differentiates() -> bool:
    """Whether grad mode is on, or forward-mode differentiation is in progress."""
    return torch.is_grad_enabled() or is_forward_ad()


is_forward_ad = _any_active((FORWARD_AD,))
"""Whether forward-mode differentiation is in progress."""

is_transformed = _any_active((FUNCTORCH, FORWARD_AD))
"""Whether a functorch transform or forward-mode differentiation in this thread sees torch calls."""
