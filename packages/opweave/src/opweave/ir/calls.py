"""Calls of one implementation, in the ways in which programs call it.

The conformance kit uses them in its own process, or through :mod:`opweave.worker` in another one,
where nothing of the kit is imported.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, distributed

from opweave import torch_compat
from opweave.ir.codegen import functional
from opweave.ir.op import IrOpImpl
from opweave.ir.ops.arguments import with_noted_lengths
from opweave.ir.registry import IrOp
from opweave.ir.scope import require

# Copies of arguments: they keep strides and aliases.


Values = tuple[Any, ...]


def copied(values: Sequence[Any]) -> Values:
    """Copy the arguments with their whole storages: strides, offsets, margins, shared memory."""
    storages: dict[int, UntypedStorage] = {}

    def copy(storage: UntypedStorage) -> UntypedStorage:
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = cloned(storage)
        return storages[storage.data_ptr()]

    copies: Values = mapped(tuple(values), lambda t: _rebuilt(t, copy(t.untyped_storage())))
    return copies


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return *value* with every tensor in it changed."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _rebuilt(t: Tensor, storage: UntypedStorage) -> Tensor:
    """Return a new tensor with the same strides and offset in another storage, or the same."""
    return tensor_in(storage, t.dtype, t.storage_offset(), t.shape, t.stride())


def tensor_in(
    storage: UntypedStorage, dtype: torch.dtype, offset: Any, shape: Sequence[int], stride: Any
) -> Tensor:
    """Return the tensor of this geometry in a storage."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, tuple(shape), tuple(stride))


def cloned(storage: Any) -> UntypedStorage:
    """Return a copy of *storage*; torch declares no types for ``clone``."""
    copy: UntypedStorage = storage.clone()
    return copy


def raw(storage: UntypedStorage) -> Tensor:
    """Return the bytes of *storage*."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def fake_values(values: Values) -> tuple[AbstractContextManager[Any], Values]:
    """Return the arguments as fake tensors (strides and dtypes, no numbers), and their mode."""
    mode = torch_compat.fake_tensor_mode()
    with mode:
        return mode, mapped(values, _fake)


def _fake(t: Tensor) -> Tensor:
    """Return what ``mode.from_tensor`` makes of a plain tensor, several times faster."""
    rest: dict[str, Any] = {"dtype": t.dtype, "device": t.device}
    if not t.storage_offset():
        return torch.empty_strided(t.shape, t.stride(), **rest)
    count = t.untyped_storage().nbytes() // t.element_size()
    return torch.empty(count, **rest).as_strided(t.shape, t.stride(), t.storage_offset())


# Global state of a process: torch settings, random numbers, the environment, the directory.


_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}  # when it first compiles
_HIDES_ALL = ("ignore", None, Warning, None, 0)  # as warnings.simplefilter("ignore") adds it


class _Part(NamedTuple):
    """How to read one part of the state, and to put it back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_TORCH}


def _write_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys() - _SET_BY_TORCH:
        del os.environ[name]
    os.environ.update(variables)


def _flushes_denormals() -> bool:
    """Whether the smallest numbers are zero to this thread."""
    return not torch.full((), 5e-324, dtype=torch.float64).mul(1.0).item()


def _numpy() -> Any:
    return sys.modules.get("numpy")


_PARTS: Mapping[str, _Part] = {
    "torch.get_num_threads()": _Part(torch.get_num_threads, torch.set_num_threads),
    "torch.get_default_dtype()": _Part(torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": _Part(torch.get_default_device, torch.set_default_device),
    "torch.get_float32_matmul_precision()": _Part(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch.is_grad_enabled()": _Part(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.are_deterministic_algorithms_enabled()": _Part(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch.is_autocast_enabled()": _Part(
        torch.is_autocast_enabled, lambda on: torch.set_autocast_enabled("cuda", on)
    ),
    "whether denormal numbers are zero": _Part(_flushes_denormals, torch.set_flush_denormal),
    "the state of torch's random numbers": _Part(
        lambda: bytes(torch.get_rng_state().numpy()),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    "the state of Python's random numbers": _Part(random.getstate, random.setstate),
    "the state of NumPy's random numbers": _Part(
        lambda: pickle.dumps(numpy.random.get_state()) if (numpy := _numpy()) else b"",
        lambda state: _numpy().random.set_state(pickle.loads(state)),
    ),
    "garbage collection": _Part(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "whether all warnings are hidden": _Part(
        lambda: _HIDES_ALL in warnings.filters,
        lambda hidden: hidden or vars(warnings)["filters"].remove(_HIDES_ALL),
    ),
    "os.environ": _Part(_environment, _write_environment),
    "the working directory": _Part(os.getcwd, os.chdir),
}


class GlobalState:
    """The state at one moment."""

    def __init__(self) -> None:
        self._values = {name: part.read() for name, part in _PARTS.items()}

    def restore(self) -> list[str]:
        """Put back what is different now, and return its names."""
        changed = [name for name, part in _PARTS.items() if part.read() != self._values[name]]
        for name in changed:
            _PARTS[name].write(self._values[name])
        return changed


# A process group of this process alone, for ops that contain a collective.


_GROUP_PARAMETER = "group"  # the parameter for the name of a process group


@contextmanager
def group_for(op: IrOp, device: str) -> Iterator[None]:
    """Initialize a process group for the block if the op needs one and it is missing."""
    needs_group = _GROUP_PARAMETER in op.schema.names
    if not needs_group or not distributed.is_available() or distributed.is_initialized():
        yield
        return
    backend = "nccl" if device == "cuda" else "gloo"
    untyped: Any = distributed  # does not export HashStore to type checkers
    distributed.init_process_group(backend, store=untyped.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


# Calls.


_PREDICATE_CALLS = 5
_OPCHECK_TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


class Calls:
    """Calls of the implementation of *op* from *provider*.

    The arguments are one value per parameter of the op. Exceptions of the implementation pass
    through.
    """

    def __init__(self, op: IrOp, provider: str) -> None:
        self.op, self._provider = op, provider
        self._held: Values = ()
        self._state: GlobalState | None = None

    @property
    def _impl(self) -> IrOpImpl:
        return self.op.impls[self._provider]

    def facts(self) -> dict[str, Any]:
        """Return what the registration says about the implementation."""
        impl = self._impl
        return {
            "supported": impl.supported, "unsupported_reason": impl.unsupported_reason,
            "traits": sorted(impl.traits), "has_predicate": not impl.supports_all_args,
        }  # fmt: skip

    def providers(self) -> list[str]:
        """Return the providers of the op."""
        return list(self.op.impls)

    def rejection(self, values: Values, *, fake: bool = False) -> str | None:
        """Return why the predicate rejects the arguments, or those without numbers."""
        return self._impl.rejection(fake_values(values)[1] if fake else self._noted(values))

    def rejection_seconds(self, values: Values) -> str:
        """Return the shortest time of several calls of the predicate, as text."""
        times, (args, kwargs) = [], self.op.schema.split(self._noted(values))
        for _ in range(_PREDICATE_CALLS):
            start = time.perf_counter()
            with suppress(Exception):  # of another check
                self._impl.accepts(*args, **kwargs)
            times.append(time.perf_counter() - start)
        return str(min(times))

    def run(
        self,
        values: Values,
        *,
        donating: bool = False,
        inference: bool = False,
        requires: Sequence[str] = (),
        threads: int | None = None,
        read_only: bool = False,
    ) -> Any:
        """Call the op once; *read_only* arguments can be in another process only.

        Args:
            values: the arguments.
            donating: donate the activations.
            inference: call in inference mode, with inference tensors.
            requires: traits that every implementation must have, also of other ops.
            threads: number of intra-op threads.
        """
        with ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
                values = mapped(values, lambda t: _rebuilt(t, t.untyped_storage()))
            if requires:
                stack.enter_context(require(*requires))
            if threads is not None:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads)
            return self._call(values, donating)

    def _noted(self, values: Values) -> Values:
        return with_noted_lengths(self.op.schema.names, values)

    def _call(self, values: Values, donating: bool = False) -> Any:
        args, kwargs = self.op.schema.split(self._noted(values))
        call: Any = self.op.using(f"{self._provider}!")
        with torch.no_grad():
            return call.maybe_inplace(*args, **kwargs) if donating else call(*args, **kwargs)

    def hold(self, values: Values) -> Any:
        """Call the op, and keep the arguments for :meth:`again`."""
        self._held = values
        return self._call(values)

    def again(self) -> Any:
        """Call the op with the arguments that are held, whose memory may have changed."""
        return self._call(self._held)

    def named(self, args: Values, kwargs: dict[str, Any], *, directly: bool) -> Any:
        """Call the op, or the implementation itself, with keyword arguments."""
        self._noted(self.op.bind(*args, **kwargs))
        call = functional(self._impl) if directly else self.op.using(f"{self._provider}!")
        with torch.no_grad():
            return call(*args, **kwargs)

    def repeat(self, values: Values, count: int, *, keep: bool) -> list[Any]:
        """Call the op *count* times with copies, and return the last result, or keep all."""
        results: list[Any] = []
        for _ in range(count):
            results = [*(results if keep else ()), self._call(copied(values))]
        return results

    def filled(self, values: Values) -> Any:
        """Call with new memory filled with NaN or the largest integer by torch."""
        before = torch.get_deterministic_debug_mode()
        # Unlike use_deterministic_algorithms, this does not import Inductor, which takes seconds.
        torch.set_deterministic_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._call(values)
        finally:
            torch.set_deterministic_debug_mode(before)

    def at_once(self, batches: Sequence[Values], count: int) -> list[Any]:
        """Call with several arguments in a thread for each, *count* times with copies."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # let Python change between threads as often as it can
        try:
            with ThreadPoolExecutor(len(batches)) as pool:
                return list(pool.map(partial(self.repeat, count=count, keep=True), batches))
        finally:
            sys.setswitchinterval(before)

    def gradients(self, values: Values, leaves: Sequence[int]) -> list[Tensor | None]:
        """Return the gradients of some arguments, of the sum of the squares of all outputs."""
        return gradients(functional(self._impl), self.op, values, leaves)

    def changes(self, values: Values) -> list[str]:
        """Return the parts of the global state that a call changes."""
        args, kwargs = self.op.schema.split(self._noted(values))
        call = self.op.using(f"{self._provider}!")
        with torch.no_grad():
            before = GlobalState()  # in here: grad mode is a part of it
            call(*args, **kwargs)
            return before.restore()

    def mark(self) -> None:
        """Remember the global state for :meth:`restore`."""
        self._state = GlobalState()

    def restore(self) -> list[str]:
        """Put back what has changed in the global state since :meth:`mark`; return its names."""
        return [] if self._state is None else self._state.restore()

    def compiled(self, values: Values, *, donating: bool) -> Any:
        """Compile a call as one graph, and return its result."""
        torch.compiler.reset()
        function = self._of_tensors(values, donating)
        compiled = torch.compile(function, backend="opweave", fullgraph=True)
        return compiled(*_tensors(values))

    def compiled_once(self, batches: Sequence[Values], axes: Sequence[int | None]) -> Any:
        """Compile a call for batches of several sizes.

        Args:
            batches: the arguments of each call.
            axes: the dimension of each argument whose size differs.

        Returns:
            The results, and the number of graphs.
        """
        torch.compiler.reset()
        graphs: list[int] = []
        compiled = torch.compile(
            self._of_tensors(copied(batches[0]), donating=False),  # or a guard compares the tensors
            backend=partial(_counting, graphs),
            fullgraph=True,
        )
        results = []
        for values in batches:
            for value, axis in zip(values, axes, strict=True):
                if axis is not None:
                    torch_compat.maybe_mark_dynamic(value, axis)
            results.append(compiled(*_tensors(values)))
        return results, len(graphs)

    def opcheck(self, values: Values) -> list[str]:
        """Return the failed tests of ``torch.library.opcheck``."""
        torch_op: Any = self.op.torch_op
        args, kwargs = self.op.schema.split(values)
        with self.op.set_priority([f"{self._provider}!"]), torch.no_grad():
            results = torch.library.opcheck(
                torch_op, args, kwargs, test_utils=_OPCHECK_TESTS, raise_exception=False
            )
        return [f"{test}: {error}" for test, error in results.items() if error != "SUCCESS"]

    def _of_tensors(self, values: Values, donating: bool) -> Callable[..., Any]:
        """Return a call as a function of the tensors in *values*, with its other values fixed."""

        def function(*tensors: Tensor) -> Any:
            remaining = iter(tensors)
            args = tuple(next(remaining) if isinstance(v, Tensor) else v for v in values)
            return self._call(args, donating)

        return function


def _tensors(values: Values) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _counting(graphs: list[int], module: Any, example: Any) -> Any:
    graphs.append(1)
    # All passes run, but no code is generated: only the number of graphs matters.
    backend: Any = torch_compat.lookup_backend("opweave")
    return backend(module, example, options={"codegen": False})


def gradients(
    function: Callable[..., Any], op: IrOp, values: Values, leaves: Sequence[int]
) -> list[Tensor | None]:
    """Return the gradients of a function of the arguments of *op*; see :meth:`Calls.gradients`."""
    for i in leaves:
        values[i].requires_grad_()
    args, kwargs = op.schema.split(values)
    with torch.enable_grad():
        result = function(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        smooth = [out for out in outputs if out.requires_grad]
        total = sum(out.double().square().sum() for out in smooth)
        assert isinstance(total, Tensor), "no output requires a gradient"
        return list(torch.autograd.grad(total, [values[i] for i in leaves], allow_unused=True))
