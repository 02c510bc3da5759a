"""The torch ops that represent an IR op in graphs and in the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library

from opweave import torch_compat
from opweave.ir.codegen import functional
from opweave.ir.errors import DTensorError
from opweave.ir.op import OpDefinition, tensors_in
from opweave.ir.priority import NATIVE, Entries, parse
from opweave.ir.rules import ROWWISE
from opweave.ir.schema import ANNOTATED_SUFFIX, ANNOTATIONS, Function
from opweave.ir.scope import current_scope
from opweave.ir.selection import (
    UNDER_VMAP,
    needs_gradient,
    policy_for,
    select_here,
    select_native,
    warn_of_fallback,
)
from opweave.packages import after_import

# The state of ``torch.autocast`` as a string, for the arguments of a graph node.
#
# The string has one ``device=dtype`` pair for each device type with autocast enabled, separated
# by commas: ``"cpu=bfloat16"``.


def to_text(dtypes: Mapping[str, torch.dtype]) -> str:
    """Encode the autocast dtype of each device type."""
    names = {device: str(dtype).removeprefix("torch.") for device, dtype in dtypes.items()}
    return ",".join(f"{device}={name}" for device, name in sorted(names.items()))


@contextmanager
def entered(text: str) -> Iterator[None]:
    """Enable autocast as *text* says inside the block; an empty text changes nothing.

    The weight cache is off: it does not change results.
    """
    with ExitStack() as stack:
        for part in filter(None, text.split(",")):
            device, _, name = part.partition("=")
            dtype = getattr(torch, name)
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        yield


# DTensor support: a sharding strategy for row-wise ops, an error for all others.
#
# A row is one index of dimension 0. An op whose native implementation has the trait ``rowwise``
# runs on each shard of the rows without communication. ``torch.distributed`` is not imported
# unless the program has imported DTensor.


_registered: WeakSet[TorchOps] = WeakSet()


def prepare_sharding(torch_ops: TorchOps, values: tuple[Any, ...]) -> None:
    """Register the sharding strategy of an op if one of *values* is a DTensor.

    Raises:
        DTensorError: an argument is a DTensor, and the op is not row-wise.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or torch_ops in _registered:
        return
    if not any(isinstance(tensor, module.DTensor) for tensor in tensors_in(values)):
        return
    op = torch_ops.op
    if ROWWISE not in op.impls[NATIVE].traits:
        raise DTensorError(
            f"{op.name} has no sharding strategy for DTensor arguments, because it is not "
            "row-wise. Call it with local tensors, x.to_local() or x.full_tensor(), or declare the "
            "op with native_traits=['rowwise'] if each row of its outputs depends on that row of "
            "the activations alone."
        )
    _register(torch_ops)
    _registered.add(torch_ops)


def _register(torch_ops: TorchOps) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    op = torch_ops.op

    def strategy(*args: Any, **kwargs: Any) -> Any:
        values = op.bind(*args, **{k: v for k, v in kwargs.items() if k not in ANNOTATIONS})
        named = dict(zip(op.schema.names, values, strict=True))
        rows = named[op.activations[0]].shape[:-1]
        outputs = op.schema.num_outputs
        strategies: Any = [([Replicate()] * outputs, [_if_tensor(v, Replicate()) for v in values])]
        if all(named[name].shape[:-1] == rows for name in op.activations) and rows:
            inputs = [_if_tensor(v, Shard(0) if _has(rows, v) else Replicate()) for v in values]
            strategies.append(([Shard(0)] * outputs, inputs))
        return strategies

    overloads: Any = (torch_ops.default, torch_ops.maybe_inplace, torch_ops.annotated)
    register_sharding([torch_op for torch_op in overloads if torch_op is not None])(strategy)


def _has(rows: torch.Size, value: Any) -> bool:
    """Whether *value* is a tensor with these rows, and not a weight with fewer dimensions."""
    return bool(getattr(value, "shape", ())[:-1] == rows)


def _if_tensor(value: Any, placement: Any) -> Any:
    return placement if hasattr(value, "shape") else None


# Opaque functions: one graph node each, which tracers do not trace into.


_libraries: list[Library] = []  # torch removes the ops of a library that is garbage-collected


def opaque_op(
    namespace: str,
    name: str,
    function: Function,
    fake: Function,
    schema: str | None = None,
    library: Library | None = None,
) -> Function:
    """Define a torch op that calls *function* with no overhead besides the dispatcher's.

    If a gradient is needed, autograd records the operations inside *function*.

    Args:
        namespace, name: the name of the op, ``torch.ops.<namespace>.<name>``.
        function: the implementation. Must not mutate its arguments or return views of them.
        fake: returns tensors with the metadata of the results.
        schema: the schema from the parenthesis on; inferred from *function* by default.
        library: owner of the op; by default a new library that lives as long as the process.
    """
    if library is None:
        _libraries.append(library := torch_compat.new_library(namespace))
    untyped: Any = library  # torch declares no types for define and impl
    untyped.define(name + (schema or torch.library.infer_schema(function, mutates_args=())))
    torch_op: Function = getattr(getattr(torch.ops, namespace), name).default

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if needs_gradient((*args, *kwargs.values())):
            return function(*args, **kwargs)
        with torch_compat.below_autograd():
            return torch_op(*args, **kwargs)

    untyped.impl(name, function, "CompositeExplicitAutograd")
    untyped.impl(name, autograd, "Autograd")
    torch_compat.register_fake(untyped, name, fake)
    return torch_op


# The torch ops that represent an IR op in graphs and in the dispatcher.
#
# Each IR op has, in the registry's namespace:
#
# - ``op``: the functional op;
# - ``op.maybe_inplace``: the same with donated activations (only with ``allow_inplace=True``). Its
#   schema is functional too: a donating call may leave its inputs unchanged, so torch's passes stay
#   correct and insert no copies;
# - ``op_annotated(..., *, str using, int[]? donate, str autocast)``: the functional op with the
#   settings of a call site and the state of ``torch.autocast`` as arguments, which survive caches
#   and serialization.
#
# Kernels are registered for CompositeExplicitAutograd (every backend including PrivateUse1,
# opaque to AOTAutograd), Autograd (a differentiable implementation if a gradient is needed) and
# FuncTorchBatched (vmap uses the native implementation).


_all: WeakValueDictionary[Function, TorchOps] = WeakValueDictionary()

# The formula of torch's FlopCounterMode for each op; torch's own registry once it is imported. Its
# module imports Triton, which opweave does not do before it calls a Triton kernel.
_flop_formulas: dict[Any, Function] = {}


def _register_flop_formulas(module: Any) -> None:
    global _flop_formulas
    module.flop_registry.update(_flop_formulas)
    _flop_formulas = module.flop_registry


after_import("torch.utils.flop_counter", _register_flop_formulas)


def torch_ops_with(torch_op: object) -> TorchOps | None:
    """Return the torch ops of the IR op that *torch_op*, such as a node's target, represents."""
    return _all.get(torch_op) if callable(torch_op) else None


class TorchOps:
    """Defines and holds the torch ops of one IR op.

    Args:
        op: the IR op.
        kernel_of: returns the call path that a kernel runs for the priority of a call site.

    Attributes:
        op: as given.
        default: the functional op.
        maybe_inplace: the op with donated activations, if there is one.
        annotated: the functional op with the settings of a call site as arguments.
    """

    def __init__(self, op: OpDefinition, kernel_of: Callable[[Entries], Any]) -> None:
        self.op, self._kernel_of = op, kernel_of
        self._packets: list[Any] = []

    def define(self, autograd_path: Any) -> None:
        """Define the torch ops; called when the IR op enters its registry.

        Args:
            autograd_path: the call path of the functional op's autograd kernel.
        """
        op = self.op
        # One library per op, so that its torch ops can be removed alone.
        self._library = torch_compat.new_library(op.namespace)
        schema = op.schema.torch
        body = f"_path.function(_op, {op.schema.call()})"
        plain_calls = op.schema.function(body, _path=autograd_path, _op=op)
        self.default = self._define(op.name, schema, plain_calls)
        self.maybe_inplace = (
            self._define(f"{op.name}.maybe_inplace", schema) if op.allow_inplace else None
        )
        self.annotated = self._define(
            op.name + ANNOTATED_SUFFIX, _with_annotations(schema), annotated=True
        )

    def remove(self) -> None:
        """Undefine the torch ops and free their names."""
        for packet in self._packets:
            _flop_formulas.pop(packet, None)
        torch_compat.remove_ops(self._library)

    def for_call(self, using: Sequence[str], *, donates: bool) -> Function:
        """Return the torch op for a call with these providers that may donate activations."""
        if using:
            donate = self.op.activation_indices if donates else None
            return partial(self.annotated, using=",".join(using), donate=donate)
        if donates and self.maybe_inplace is not None:
            return self.maybe_inplace
        return self.default

    def _define(
        self, name: str, schema: str, autograd: Function | None = None, *, annotated: bool = False
    ) -> Function:
        library: Any = self._library  # torch does not annotate define and impl
        base, _, overload = name.partition(".")
        library.define(name + schema)
        packet = getattr(getattr(torch.ops, library.ns), base)
        torch_op: Function = getattr(packet, overload or "default")
        kernel, batched, fake = self._plain_kernel(), self._batched, self._fake
        if annotated:
            kernel = _drop_annotations(self._kernel, reads_using=True)
            batched, fake = _drop_annotations(batched, reads_using=True), _drop_annotations(fake)
        autograd = autograd or partial(self.autograd, torch_op, annotated=annotated)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        library.impl(name, autograd, "Autograd")
        library.impl(name, batched, "FuncTorchBatched")
        torch_compat.register_fake(library, name, fake)
        self._packets.append(packet)
        _flop_formulas[packet] = self._flops
        _all[torch_op] = self
        return torch_op

    def _plain_kernel(self) -> Function:
        """Return the kernel of calls without annotations; every step here costs 0.1 µs."""
        path = self._kernel_of(())
        body = f"_path.function(_op, {self.op.schema.call()})"
        return self.op.schema.function(body, _path=path, _op=self.op)

    def _kernel(self, *args: Any, using: str = "", **kwargs: Any) -> Any:
        path = self._kernel_of(call_site(using))
        return path.function(self.op, *args, **kwargs)

    def autograd(self, torch_op: Function, *args: Any, annotated: bool, **kwargs: Any) -> Any:
        """Run a call with a differentiable implementation if a gradient is needed."""
        rest = {k: v for k, v in kwargs.items() if not (annotated and k in ANNOTATIONS)}
        values = self.op.bind(*args, **rest)
        if not needs_gradient(values):
            prepare_sharding(self, values)
            with torch_compat.below_autograd():
                return torch_op(*args, **kwargs)
        using = kwargs.get("using", "") if annotated else ""
        policy = policy_for(self.op, call_site(using), differentiable=True)
        autocast = kwargs.get("autocast", "") if annotated else ""
        with entered(autocast) if self.op.autocast else torch_compat.no_autocast():
            selection = select_here(self.op, values, policy)
            warn_of_fallback(selection)
            with selection.impl.noting():
                return functional(selection.impl)(*args, **rest)

    def _batched(self, *args: Any, using: str = "", **kwargs: Any) -> Any:
        policy = policy_for(self.op, call_site(using))
        selection = select_native(self.op, policy, UNDER_VMAP)
        scope = current_scope()
        for recorder in scope.recorders if scope else ():
            recorder(selection, self.op.bind(*args, **kwargs))
        with selection.impl.noting():
            return self.op.native(*args, **kwargs)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        return self.op.fake(*args, **kwargs)

    def _flops(self, *args: Any, out_val: object, **kwargs: Any) -> int:
        """Return what ``FlopCounterMode`` counts in the definition, on tensors without data."""
        named = {name: value for name, value in kwargs.items() if name not in ANNOTATIONS}
        args, named = torch_compat.map_tensors(_without_data, (args, named))
        counter = sys.modules["torch.utils.flop_counter"].FlopCounterMode(display=False)
        with counter, suppress(Exception):  # it may read data
            self.op.native(*args, **named)
        return int(counter.get_total_flops())


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def call_site(using: str) -> Entries:
    """Parse the comma-joined names of ``op.using(...)`` into priority entries."""
    return parse(using, f"call site .using({using})") if using else ()


def _with_annotations(schema: str) -> str:
    parameters, returns = schema.rsplit(" -> ", 1)
    separator = ", " if "*" in parameters else ", *, "
    # donate is optional: AOTInductor passes None for an omitted empty list.
    annotations = "str using='', int[]? donate=None, str autocast=''"
    return f"{parameters[:-1]}{separator}{annotations}) -> {returns}"


def _drop_annotations(function: Function, *, reads_using: bool = False) -> Function:
    def without(
        *args: Any,
        using: str = "",
        donate: Sequence[int] | None = None,
        autocast: str = "",
        **kw: Any,
    ) -> Any:
        named = {**kw, "using": using} if reads_using else kw
        with entered(autocast):
            return function(*args, **named)

    return without
