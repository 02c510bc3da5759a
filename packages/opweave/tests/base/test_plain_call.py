"""All users of :mod:`opweave.plain_call` give the same answer in every state of a thread."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opweave import ir, native, plain_call
from opweave.ir import codegen, rules
from opweave.ir.dispatch import Path, _is_undisturbed, _needs_dispatcher
from opweave.ir.ops.arguments import is_readable
from opweave.native.calls import callable_of
from support.hypothesis_profiles import examples

Body = Callable[[], None]


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def inside(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Body], None]:
    def run(body: Body) -> None:
        with context():
            body()

    return run


def in_vmap(body: Body) -> None:
    torch.func.vmap(lambda t: (body(), t)[1])(torch.zeros(2))


def in_transform_of_grad(body: Body) -> None:
    torch.func.grad(lambda t: (body(), t.sum())[1])(torch.zeros(2))


def in_jit_trace(body: Body) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.trace(lambda t: (body(), t * 1)[1], torch.zeros(2), check_trace=False)


# Active states, and how to run a function in each. The names are this test's own.
STATES: dict[str, Callable[[Body], None]] = {
    "function mode": inside(FunctionMode),
    "default device": inside(lambda: torch.device("cpu")),  # a function mode, too
    "dispatch mode": inside(DispatchMode),
    "vmap": in_vmap,
    "func.grad": in_transform_of_grad,
    "jit.trace": in_jit_trace,
    "forward AD": inside(forward_ad.dual_level),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
}
FUNCTION_MODES = {"function mode", "default device"}
HIDING = {"dispatch mode", "vmap", "func.grad", "jit.trace"}
GRAD_MODES: dict[str, Callable[[Body], None]] = {
    "no_grad": inside(torch.no_grad),
    "enable_grad": inside(torch.enable_grad),
    "inference_mode": inside(torch.inference_mode),
}
TENSORS: dict[str, Callable[[], Tensor]] = {
    "Tensor": lambda: torch.ones(2, 8),
    "Parameter": lambda: torch.nn.Parameter(torch.ones(2, 8)),
    "requires_grad": lambda: torch.ones(2, 8, requires_grad=True),
    "view": lambda: torch.ones(2, 16)[:, ::2],
    "subclass": lambda: torch.ones(2, 8).as_subclass(Subclass),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2, 8)),
}


@dataclass
class State:
    """A state of a thread, and what follows from it by the documentation of torch."""

    active: tuple[str, ...]
    grad_mode: str
    kind: str

    @property
    def is_watched(self) -> bool:
        return bool(FUNCTION_MODES & set(self.active)) or self.hides_values

    @property
    def hides_values(self) -> bool:
        return bool(HIDING & set(self.active))

    @property
    def grad_is_on(self) -> bool:
        return self.grad_mode == "enable_grad"

    @property
    def has_plain_type(self) -> bool:
        return self.kind not in ("subclass", "fake")

    @property
    def records(self) -> bool:
        return self.grad_is_on and self.kind in ("Parameter", "requires_grad")

    @property
    def is_plain(self) -> bool:
        return not self.active and self.has_plain_type and not self.records

    @property
    def path(self) -> str:
        if self.active or not self.has_plain_type:
            return "slow"
        return "differentiated" if self.records else "plain"


def can_be_nested(active: tuple[str, ...]) -> bool:
    """torch.jit.trace and torch.func know nothing of each other, and fail together."""
    return "jit.trace" not in active or not {"vmap", "func.grad"} & set(active)


states = st.builds(
    State,
    st.lists(st.sampled_from(sorted(STATES)), max_size=3, unique=True)
    .map(tuple)
    .filter(can_be_nested),
    st.sampled_from(sorted(GRAD_MODES)),
    st.sampled_from(sorted(TENSORS)),
)


def run_in(state: State, body: Callable[[Tensor], None]) -> None:
    """Call *body* in that state. The grad mode is entered last: transforms change it."""
    tensor, calls = TENSORS[state.kind](), []

    def once() -> None:
        if not calls:  # vmap's rules may call a function more often
            calls.append(1)
            GRAD_MODES[state.grad_mode](lambda: body(tensor))

    run: Body = once
    for name in state.active:
        run = lambda inner=run, enter=STATES[name]: enter(inner)  # type: ignore[misc] # noqa: E731
    run()
    assert calls


@pytest.fixture(params=["native check", "facts one by one"])
def path_of(
    request: pytest.FixtureRequest, registry: ir.Registry, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Tensor], str]:
    """Return a function that calls an op, and says how: only a slow call uses the dispatcher."""
    check = native.plain_check() if request.param == "native check" else None
    if request.param == "native check" and check is None:
        pytest.skip("no native module")
    paths: list[str] = []
    slow, armed = Path.slow, []

    def spy(self: Path, *args: Any, **kwargs: Any) -> Any:
        paths.append("slow")  # the rest of a call, which a tracer would see, is left out
        return None if armed else slow(self, *args, **kwargs)

    monkeypatch.setattr(Path, "slow", spy)
    monkeypatch.setattr(Path, "differentiated", lambda *args: paths.append("differentiated"))
    monkeypatch.setattr(codegen, "_plain_check", check)

    @ir.register_op
    def state_probe(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return x * 2

    for _ in range(2):  # the first call generates the function
        state_probe(torch.ones(2, 8))

    def call(x: Tensor) -> str:
        paths.clear()
        state_probe(x)
        return paths[0] if paths else "plain"

    armed.append(True)
    assert call(torch.ones(2, 8)) == "plain"
    return call


@examples(150)
@given(state=states)
def check_the_generated_path(path_of: Callable[[Tensor], str], state: State) -> None:
    def body(x: Tensor) -> None:
        assert path_of(x) == state.path, state

    run_in(state, body)


def test_the_generated_path_skips_the_dispatcher_in_plain_states_only(
    path_of: Callable[[Tensor], str],
) -> None:
    for name in STATES:  # each alone, besides the drawn ones
        for kind in TENSORS:
            run_in(
                alone := State((name,), "no_grad", kind),
                lambda x, alone=alone: _expect(path_of(x) == alone.path, alone),  # type: ignore[misc]
            )
    check_the_generated_path(path_of)


def _expect(holds: bool, state: State) -> None:
    assert holds, state


@examples(300)
@given(states)
def test_all_other_users_agree(state: State) -> None:
    check = native.plain_check()

    def body(x: Tensor) -> None:
        watched, hides = state.is_watched, state.hides_values
        assert plain_call.is_watched() is watched
        assert plain_call.hides_values() is hides
        assert plain_call.differentiates() is (state.grad_is_on or "forward AD" in state.active)
        transformed = bool({"vmap", "func.grad", "forward AD"} & set(state.active))
        assert plain_call.is_transformed() is transformed
        if state.active and state.active[0] == "dispatch mode":  # the innermost
            assert plain_call.kernels_are_traced()
        assert _needs_dispatcher((x, None)) is (watched or not state.has_plain_type)
        assert is_readable(x) is (state.has_plain_type and not hides)
        assert _is_undisturbed([x]) is not (watched or "autocast" in state.active)
        if check is not None:
            plain = state.has_plain_type and not watched and not state.grad_is_on
            assert (check(x, None) > 0) is plain

    run_in(state, body)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "columns": lambda x: x[..., :1],
    "every other column": lambda x: x[..., ::2],
    "turned": lambda x: x.transpose(0, -1),
    "expanded": lambda x: x[..., :1].expand_as(x),
    "negated": torch._neg_view,
    "meta": lambda x: x.to("meta"),
    "scalar": lambda x: x.sum(),
    "empty": lambda x: x[:0],
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@examples(100)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    layouts=st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=1, max_size=3),
)
def test_the_native_check_knows_plain_rows(shape: list[int], layouts: list[str]) -> None:
    check = native.plain_check()
    if check is None:
        pytest.skip("no native check")
    tensors = [LAYOUTS[name](torch.ones(shape)) for name in layouts]
    with torch.no_grad():
        kind = check(*tensors, None)
    are_rows = all(
        t.is_cpu and not t.is_neg() and (t.ndim == 0 or t.stride(-1) == 1) for t in tensors
    )
    assert kind == (2 if are_rows else 1)
    if kind == 2:
        rule = rules.cpu("x") & rules.unit_stride("x")
        schema = ir.ops.relu2.schema
        assert all(rules.holds(rule, schema, {"x": t}) for t in tensors)


@examples(150)
@given(states)
def test_functions_of_native_modules_agree(state: State) -> None:
    direct_calls = []
    raw = types.ModuleType("raw")
    vars(raw)["rms_norm"] = lambda *arguments: direct_calls.append(arguments)
    call = callable_of("rms_norm", raw, "probe", direct=True, problem="none here")

    def body(x: Tensor) -> None:
        with contextlib.suppress(RuntimeError):  # the dispatcher has no such op
            call(torch.empty(2, 8), x, None, 1e-6)
        watched = state.is_watched or state.grad_is_on or "forward AD" in state.active
        assert bool(direct_calls) is not watched, state

    run_in(state, body)
