"""Call paths of an op: a generated fast path, the slow path behind it, and the call variants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opweave import plain_call, torch_compat
from opweave.ir.codegen import Generator, Kind, Ranges, functional, run_donating
from opweave.ir.donation import poison_unused
from opweave.ir.errors import InvalidResultError, TensorArgumentError
from opweave.ir.op import IrOpImpl, OpDefinition, tensors_in
from opweave.ir.priority import Entries
from opweave.ir.schema import ANNOTATIONS, Function, Param
from opweave.ir.scope import Scope, current_scope, entered
from opweave.ir.selection import (
    Policy,
    autocasts,
    candidates,
    needs_gradient,
    policy_for,
    select_here,
    warn_of_fallback,
)
from opweave.ir.torch_ops import TorchOps, prepare_sharding, torch_ops_with

# Call paths of an op: a generated fast path, and the slow path behind it.
#
# The fast path is generated from the candidates that selection walks, see
# :mod:`opweave.ir.codegen`. Modes, tensor subclasses, gradients and errors go to
# :meth:`Path.slow`, which calls :func:`opweave.ir.selection.select`.


class _OpSignature:
    """The ``__signature__`` of a :class:`Callee` and its class, for ``inspect`` and ``help``."""

    def __get__(self, instance: object, owner: type[Callee]) -> inspect.Signature:
        op: OpDefinition | None = vars(owner).get("called_op")
        if op is None:
            raise AttributeError("__signature__")  # a class such as IrOp itself
        return inspect.signature(op.native)


class Callee:
    """A callable whose class is unique, so that ``__call__`` can be a generated function.

    This is the fastest way from ``op(...)`` to a kernel: no dictionary lookup and no ``*args``.
    """

    __call__: Function
    traced: Function  # the torch op that Dynamo puts into its graph for a call
    called_op: OpDefinition  # set on the unique class
    __signature__ = _OpSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        callee: Self = object.__new__(type(cls.__name__, (cls,), {}))
        return callee

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self  # an op is a singleton


class Path:
    """One way to call an op (kind and call-site priority), and the function generated for it.

    The function is generated on first use, again after each change of registrations or settings,
    and once for each distinct policy of the scopes it is called in. It becomes the ``__call__`` of
    *callee*, if there is one.
    """

    def __init__(
        self, torch_ops: TorchOps, kind: Kind, call_site: Entries = (), callee: Callee | None = None
    ) -> None:
        self.op, self._torch_ops = torch_ops.op, torch_ops
        self.kind, self.call_site, self.callee = kind, call_site, callee
        self.version = 0
        self._is_prepared = False
        # Scopes are short-lived; those with equal policies share a function.
        self._by_policy: dict[tuple[object, ...], Function] = {}
        self._differentiable: Function | None = None
        if callee is not None:
            callee.traced = self.torch_op
            type(callee).__doc__ = self.op.native.__doc__  # help() reads it from the class
            type(callee).called_op = self.op
        self._install(None)

    @property
    def donates(self) -> bool:
        return self.kind is Kind.DONATING

    def reset(self) -> None:
        """Discard the generated functions; the next call generates them again."""
        self.version += 1
        self._is_prepared = False
        self._by_policy = {}
        self._differentiable = None
        self._install(None)

    def ensure_prepared(self) -> bool:
        """Generate the function for the current settings unless it exists.

        Returns:
            Whether it was generated.
        """
        self.op.settings.ensure_ready()
        with self.op.settings.lock:
            if self._is_prepared:
                return False
            with entered(Scope(None)):  # scopes have functions of their own
                self._install(self._candidates(policy_for(self.op, self.call_site)))
            self._is_prepared = True
            return True

    def _candidates(self, policy: Policy) -> Ranges:
        return [(limit, candidates(self.op, part)) for limit, part in policy.by_size()]

    def _generate(self, ranges: Ranges, scoped: Function | None) -> tuple[str, Function]:
        return Generator(
            self.op, self.kind, ranges, check_result, self.slow, scoped, self.differentiated
        ).compile()

    def _install(self, ranges: Ranges | None) -> None:
        if ranges is None:
            self.source, self.function = "", _slow_function(self)
        else:
            self.source, self.function = self._generate(ranges, self.scoped)
        if self.callee is not None:
            torch_compat.trace_instead(self.function, _traced)
            torch_compat.run_untraced(self.function)
            setattr(type(self.callee), "__call__", self.function)  # noqa: B010 (not to be typed)

    def scoped(self, scope: Scope) -> Function:
        """Return the function for calls inside *scope*."""
        key = (self, self.version)
        function = scope.compiled.get(key)
        if function is None:
            function = _slow_function(self) if scope.recorders else self._in_scope()
            scope.compiled[key] = function
        return function

    def _in_scope(self) -> Function:
        policy = policy_for(self.op, self.call_site)
        key = (policy.priority, tuple(policy.required.items()), policy.tuned)
        function = self._by_policy.get(key)
        if function is None:
            _, function = self._generate(self._candidates(policy), None)
            self._by_policy[key] = function
        return function

    def slow(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call that the fast path does not handle, or that comes before it is generated."""
        if self.ensure_prepared():
            return self.function(self.op, *args, **kwargs)
        if not self.op.autocast and torch_compat.any_autocast_enabled():
            with torch_compat.no_autocast():
                return self.function(self.op, *args, **kwargs)
        if self.kind is Kind.AUTOGRAD:
            torch_ops = self._torch_ops
            return torch_ops.autograd(torch_ops.default, *args, annotated=False, **kwargs)
        values = self.op.bind(*args, **kwargs)
        if self.kind is not Kind.KERNEL and _needs_dispatcher(values):
            if not needs_gradient(values):
                prepare_sharding(self._torch_ops, values)
            return self.torch_op(*args, **kwargs)
        check_types(self.op, values)
        return self._execute(values)

    def differentiated(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call outside of scopes that is plain but for the gradient it needs."""
        function = self._differentiable or self._generate_differentiable()
        return function(self.op, *args, **kwargs)

    def _generate_differentiable(self) -> Function:
        def check(impl: IrOpImpl, result: Any, args: Any, kwargs: Any) -> bool:
            # Once per implementation: the choice implies which ones were passed over.
            warn_of_fallback(select_here(self.op, self.op.bind(*args, **kwargs), policy))
            return check_result(impl, result, args, kwargs)

        with self.op.settings.lock:
            policy = policy_for(self.op, self.call_site, differentiable=True)
            _, self._differentiable = Generator(
                self.op, Kind.KERNEL, self._candidates(policy), check, self.slow
            ).compile()
            return self._differentiable

    @property
    def torch_op(self) -> Function:
        """The torch op that stands for this path in graphs."""
        return self._torch_ops.for_call(
            [str(entry) for entry in self.call_site], donates=self.donates
        )

    def _execute(self, values: tuple[Any, ...]) -> Any:
        differentiable = self.kind is not Kind.KERNEL and needs_gradient(values)
        policy = policy_for(self.op, self.call_site, differentiable=differentiable)
        selection = select_here(self.op, values, policy)
        warn_of_fallback(selection)
        scope = current_scope()
        for recorder in scope.recorders if scope else ():
            recorder(selection, values)
        args, kwargs = self.op.schema.split(values)
        donates = self.donates and not differentiable
        impl = selection.impl
        run = partial(run_donating, impl) if donates else functional(impl)
        with impl.noting():
            result = run(*args, **kwargs)
        check_result(impl, result, args, kwargs)
        if donates and self.op.settings.check_donation:
            poison_unused(self.op, values, result)
        return result


def _slow_function(path: Path) -> Function:
    """Return a function for a path that is not prepared (code generation is lazy) or recorded."""

    def call(_callee: object, *args: Any, **kwargs: Any) -> Any:
        return path.slow(*args, **kwargs)

    return call


def _traced(callee: Callee, *args: Any, **kwargs: Any) -> Any:
    # Must not have a closure: Dynamo would look it up in the function that this one replaces.
    return callee.traced(*args, **kwargs)


def _needs_dispatcher(values: tuple[Any, ...]) -> bool:
    """Whether the torch dispatcher must run the call: modes, tracers, subclasses, functorch."""
    return (
        plain_call.is_watched()
        or any(type(t) not in plain_call.PLAIN_TYPES for t in tensors_in(values))
        or any(
            hasattr(type(v), "__torch_function__") and not isinstance(v, torch.Tensor)
            for v in values
        )
    )


# Check the arguments of a call.


def check_types(op: OpDefinition, values: Sequence[Any]) -> None:
    """Raise TensorArgumentError if a tensor parameter of *op* gets any other type."""
    for param, value in zip(op.schema.params, values, strict=True):
        if param.is_tensor and not isinstance(value, Tensor):
            if value is None and param.is_optional:
                continue
            kind = "a Tensor or None" if param.is_optional else "a Tensor"
            raise TensorArgumentError(
                f"{op.name}: {param.name} must be {kind}, found {type(value).__name__}."
            )
        if param.is_tensor_list and (problem := _list_problem(param, value)):
            items = "Tensors and None" if param.has_optional_items else "Tensors"
            raise TensorArgumentError(
                f"{op.name}: {param.name} must be a list or tuple of {items}, found {problem}."
            )


def _list_problem(param: Param, value: Any) -> str | None:
    """Return the unsuitable type in the value of a tensor list parameter, or None."""
    if not isinstance(value, (list, tuple)):
        return type(value).__name__
    for i, item in enumerate(value):
        if not isinstance(item, Tensor) and not (item is None and param.has_optional_items):
            return f"{type(item).__name__} at [{i}]"
    return None


# Check the results of implementations against the outputs of their op.
#
# The number of outputs is checked at the first call of each generated function, and in every call
# of the slow path. Dtypes, shapes, devices and memory take longer to check: this happens at the
# first call of an implementation and, if that had a single row, at the first call with more.
# opweave's own implementations are exempt, since its tests cover them, and the first elementwise
# function of a meta tensor imports ``torch._dynamo``, which takes over a second.


_OUTPUTS = (Tensor, torch.fx.Proxy)
_META = torch.device("meta")
# Stop waiting for a call with more than one row after several one-token forwards of a deep model.
_MAX_CHECKS = 1000
_checks: WeakKeyDictionary[IrOpImpl, int] = WeakKeyDictionary()


class _Output(NamedTuple):
    """The metadata of an output that is compared."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] {self.device}"


def check_result(
    impl: IrOpImpl, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Check the result of *impl* for these arguments.

    Returns:
        Whether later results of *impl* need no check.

    Raises:
        InvalidResultError: the outputs do not match the op's.
    """
    _check_count(impl, result)
    if impl.impl_fn is impl.op.native or impl.site.is_in_opweave:
        return True
    checks = _checks.get(impl, 0)
    if checks < _MAX_CHECKS:
        tensors = tensors_in([*args, *kwargs.values()])
        # A wrong shape may go unnoticed with a single row, as in a warm-up call.
        one_row = bool(tensors) and tensors[0].shape[:1] == (1,)
        if not (checks and one_row):
            _check_metadata(impl, result, tensors, args, kwargs)
        _checks[impl] = checks = checks + 1 if one_row else _MAX_CHECKS
    return checks == _MAX_CHECKS


def _check_count(impl: IrOpImpl, result: Any) -> None:
    count, is_tuple = impl.op.schema.num_outputs, impl.op.schema.returns_tuple
    if isinstance(result, torch.fx.Proxy):
        return  # a proxy may stand for any number of outputs
    is_sequence = isinstance(result, (tuple, list))
    outputs = result if is_sequence else [result]
    wrong = [type(value).__name__ for value in outputs if not isinstance(value, _OUTPUTS)]
    if is_sequence == is_tuple and len(outputs) == count and not wrong:
        return
    expected = f"a tuple of {count} Tensors" if is_tuple else "one Tensor"
    returned = type(result).__name__
    if is_sequence:
        returned += f" of {len(outputs)}" + (f" with {wrong[0]} in it" if wrong else "")
    raise _invalid(impl, f"must return {expected}, found {returned}.")


def _check_metadata(
    impl: IrOpImpl,
    result: Any,
    tensors: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    outputs = tensors_in([result])
    if not (_are_plain([*tensors, *outputs]) and _is_undisturbed(tensors)):
        return
    returned = [_Output(t.dtype, tuple(t.shape), t.device) for t in outputs]
    for i, (fake, has) in enumerate(zip(_expected(impl, args, kwargs), returned, strict=False)):
        if has != (expected := _located(fake, tensors, has)):
            which = f" as output {i}" if len(returned) > 1 else ""
            raise _invalid(
                impl,
                f"returned {has}{which}, but the op's fake implementation returns {expected}. "
                "Fix it, or leave the provider out of the priority.",
            )
    if not impl.inplace:
        _check_memory(impl, outputs, tensors)


def _check_memory(impl: IrOpImpl, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Check that no output shares memory with an argument."""
    for i, output in enumerate(outputs):
        if output.numel() and any(torch_compat.share_storage(output, t) for t in tensors):
            which = f"output {i}" if len(outputs) > 1 else "its output"
            raise _invalid(
                impl,
                f"returned {which} in the memory of an argument. Clone it; or if it writes into "
                "the op's activations, register it with inplace=True.",
            )


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    return all(type(t) in plain_call.PLAIN_TYPES and t.layout is torch.strided for t in tensors)


def _is_undisturbed(tensors: Sequence[Tensor]) -> bool:
    """Whether the outputs depend on the arguments alone, not on a mode or autocast."""
    return not plain_call.is_watched() and not autocasts(tensors)


def _expected(impl: IrOpImpl, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Output]:
    """Return the outputs of the op's fake implementation, or an empty list if that fails."""
    try:
        # Kernels do not support meta tensors, so ops called inside are faked too.
        with torch.no_grad(), OpMode(lambda op, *args, **kwargs: op.fake(*args, **kwargs)):
            result = impl.op.fake(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
    except Exception:  # data-dependent shapes, or a faulty fake: not an error of the kernel
        return []
    return [_Output(t.dtype, tuple(t.shape), t.device) for t in tensors_in([result])]


def _located(output: _Output, tensors: Sequence[Tensor], returned: _Output) -> _Output:
    """Return a fake *output* on the device of the arguments, or of *returned* if those differ."""
    if output.device != _META:
        return output
    devices = {t.device for t in tensors}
    return output._replace(device=devices.pop() if len(devices) == 1 else returned.device)


def _meta(value: Any) -> Any:
    """Replace tensors by meta tensors, which are cheaper to make than fake tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_meta, value))
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


class OpMode(TorchFunctionMode):
    """Runs a function of each op that is called, instead of its torch op.

    Args:
        call: runs the op with the arguments, without annotations.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        torch_ops, named = torch_ops_with(function), kwargs or {}
        if torch_ops is None:
            return function(*args, **named)
        with self:  # torch disables the mode here, but the function may call other ops
            rest = {name: value for name, value in named.items() if name not in ANNOTATIONS}
            return self._call(torch_ops.op, *args, **rest)


def _invalid(impl: IrOpImpl, problem: str) -> InvalidResultError:
    return InvalidResultError(
        f"{impl.op.name}: the implementation {impl.provider!r} ({impl.place}) {problem}"
        f"{impl.way_out}"
    )


# The call variants ``op.maybe_inplace`` and ``op.using(...)``.


class IrOpInplaceOverload(Callee):
    """``op.maybe_inplace``: call the op and donate its activations.

    A kernel may write its outputs into their memory, so reading an activation after the call is
    undefined behavior.

    Attributes:
        op: the op.
        path: its call path.
    """

    def __init__(self, functional: Callee, torch_ops: TorchOps, entries: Entries = ()) -> None:
        self._functional, self.op = functional, torch_ops.op
        self.path = Path(torch_ops, Kind.DONATING, entries, callee=self)

    def __repr__(self) -> str:
        return f"<maybe_inplace of {self.op!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._functional, "maybe_inplace")


class CallSite(Callee):
    """``op.using(...)``: call the op with a priority that comes before all others.

    Attributes:
        op: the op.
        entries: the priority.
        paths: its call paths, functional and donating.
        maybe_inplace: the donating variant, if the op has one.
    """

    maybe_inplace: IrOpInplaceOverload

    def __init__(self, torch_ops: TorchOps, entries: Entries) -> None:
        self.op, self.entries = torch_ops.op, entries
        self.paths = [Path(torch_ops, Kind.CALL, entries, callee=self)]
        if self.op.allow_inplace:
            self.maybe_inplace = IrOpInplaceOverload(self, torch_ops, entries)
            self.paths.append(self.maybe_inplace.path)

    def __repr__(self) -> str:
        return f"<{self.op.name}.using({', '.join(repr(str(e)) for e in self.entries)})>"

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("using", *map(str, self.entries)), (self.op,)

    def __getattr__(self, name: str) -> Any:
        if name == "maybe_inplace":
            return getattr(self.op, name)  # raises DonationError
        raise AttributeError(f"{self!r} has no attribute {name!r}; see the op, its attribute 'op'.")

    def dispatch(self, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call with these arguments would run."""
        return dispatched(self.op, self.entries, *args, **kwargs)

    def get_priority(self) -> list[str]:
        """Return the providers in the current order of priority, this call site's first."""
        return [str(entry) for entry in policy_for(self.op, self.entries).priority]


def dispatched(op: OpDefinition, entries: Entries, /, *args: Any, **kwargs: Any) -> IrOpImpl:
    """Return the implementation that a call would run at a call site with *entries*."""
    values = op.bind(*args, **kwargs)
    policy = policy_for(op, entries, differentiable=needs_gradient(values))
    return select_here(op, values, policy).impl


class TracedCallSite:
    """``op.using(...)`` while Dynamo traces: calls the torch op with the names as an argument.

    Dynamo cannot trace code generation, so this class avoids it. The names are checked when the
    graph runs.
    """

    def __init__(self, torch_ops: TorchOps, using: str) -> None:
        self._torch_ops, self._using = torch_ops, using

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._torch_ops.annotated(*args, using=self._using, **kwargs)

    def maybe_inplace(self, *args: Any, **kwargs: Any) -> Any:
        donate = self._torch_ops.op.activation_indices
        return self._torch_ops.annotated(*args, using=self._using, donate=donate, **kwargs)
