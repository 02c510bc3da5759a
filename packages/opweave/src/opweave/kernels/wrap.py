"""Turn functions of kernel libraries into implementations of ops."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor
from torch.library import Library

from opweave import torch_compat, transaction
from opweave.ir import IrOp, IrOpImpl
from opweave.ir.errors import InvalidOpError, did_you_mean
from opweave.ir.rules import Predicate, named_call
from opweave.ir.torch_ops import opaque_op
from opweave.packages import folders_of, is_installed

# Functions of kernel libraries, imported at the first call.


Function = Callable[..., Any]


@dataclass(frozen=True)
class ModuleFunction:
    """A function of an installed package.

    Attributes:
        name: the module and the function, such as ``"package.module:function"``.
    """

    name: str

    def __post_init__(self) -> None:
        module, colon, path = self.name.partition(":")
        parts = (*module.split("."), *path.split("."))
        if not (colon and all(part.isidentifier() for part in parts)):
            raise InvalidOpError(
                f"{self.name!r} does not name a function, as 'package.module:function' does."
            )

    def obstacle(self) -> str | None:
        package = self.name.partition(":")[0].partition(".")[0]
        return None if is_installed(package) else f"{package} is not installed"

    def file(self) -> Path | None:
        """Return the file of the module, without importing it; None if it does not exist."""
        module, _, _ = self.name.partition(":")
        package, *rest = module.split(".")
        for folder in folders_of(package):
            path = folder.joinpath(*rest)
            for file in (path / "__init__.py", path.with_suffix(".py")):
                if file.is_file():
                    return file
        return None

    def load(self) -> Function:
        module, _, path = self.name.partition(":")
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        return cast(Function, target)


@dataclass(frozen=True)
class FunctionByArgument:
    """A function of an installed package that is chosen by the value of an argument.

    Attributes:
        parameter: the op's parameter.
        functions: the function for each value, as ``"package.module:function"``.
    """

    parameter: str
    functions: Mapping[object, str]

    def named(self) -> list[ModuleFunction]:
        return [ModuleFunction(name) for name in self.functions.values()]

    def obstacle(self) -> str | None:
        return next(filter(None, (function.obstacle() for function in self.named())), None)

    def load(self) -> dict[object, Function]:
        loaded = (function.load() for function in self.named())
        return dict(zip(self.functions, loaded, strict=True))


@dataclass(frozen=True)
class HubKernel:
    """A function of a kernel repository of Hugging Face, in the layout of its package ``kernels``.

    Give a version, a revision or a lock file with a repository's name, so that later changes of the
    repository cannot change what runs.

    Attributes:
        repository: the repository's name, or the path of a local one.
        name: the function.
        version, revision: the version or revision of the repository.
        lockfile: a ``kernels.lock``, written by ``kernels lock``.
        trust_remote_code: load the kernel even if ``kernels`` does not trust its publisher.
    """

    repository: str | Path
    name: str
    version: int | None = None
    revision: str | None = None
    lockfile: Path | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        pins = [self.version, self.revision, self.lockfile]
        count = sum(pin is not None for pin in pins)
        if count != (0 if isinstance(self.repository, Path) else 1):
            raise InvalidOpError(
                f"HubKernel({self.repository!r}, {self.name!r}): give one of version=, revision= "
                "and lockfile= with a repository's name, and none with a Path."
            )

    def obstacle(self) -> str | None:
        if not is_installed("kernels"):
            return "kernels is not installed: pip install kernels"
        if isinstance(self.repository, Path) and not self.repository.is_dir():
            return f"{self.repository} is not a folder"
        return None

    def load(self) -> Function:
        import kernels

        if isinstance(self.repository, Path):
            module = kernels.get_local_kernel(self.repository)
        elif self.lockfile is not None:
            module = kernels.get_locked_kernel(
                self.repository, lockfile=self.lockfile, trust_remote_code=self.trust_remote_code
            )
        else:
            module = kernels.get_kernel(
                self.repository,
                version=self.version,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
            )
        return cast(Function, getattr(module, self.name))


_PACKAGE_NAMES = {"triton": "Triton", "cutlass": "CUTLASS (nvidia-cutlass-dsl)"}


class Support(TypedDict):
    """Options of :func:`wrap`."""

    supported: bool
    unsupported_reason: str | None


def requires(*packages: str, gpu: bool = True) -> Support:
    """Return options of :func:`wrap` for a library that runs with other packages, or on a GPU."""
    missing = [_PACKAGE_NAMES.get(name, name) for name in packages if not is_installed(name)]
    reason = f"{' and '.join(missing)} is not installed" if missing else "torch finds no GPU"
    is_supported = not missing and not (gpu and not torch.cuda.is_available())
    return {"supported": is_supported, "unsupported_reason": None if is_supported else reason}


# Register implementations as opaque torch ops, which tracers record as one node.


# Torch removes the ops of a library that is garbage-collected.
_libraries: dict[Library, str] = {}


def opaque(op: IrOp, namespace: str, name: str = "") -> Callable[[Function], Function]:
    """Register the decorated implementation of *op* as a torch op in *namespace*.

    If gradients are required, autograd records the operators inside it instead. Plain eager calls
    bypass the torch op.

    Args:
        name: the name of the torch op; by default that of *op*.
    """

    def wrap(function: Function) -> Function:
        library = new_library(namespace, name or op.name)
        torch_op = opaque_op(
            namespace, name or op.name, function, op.fake, op.schema.torch, library
        )
        wrapped = op.schema.function(f"_op({op.schema.call()})", _op=torch_op)
        wrapped.__module__ = function.__module__
        wrapped.__wrapped__ = function  # type: ignore[attr-defined]
        return undispatched(function)(wrapped)

    return wrap


def undispatched(plain: Function) -> Callable[[Function], Function]:
    """Let plain calls of the decorated implementation run *plain* instead.

    Args:
        plain: computes the same without the torch ops of the implementation, which tracers, modes
            and autograd see.
    """

    def decorate(function: Function) -> Function:
        function.undispatched = plain  # type: ignore[attr-defined]
        return function

    return decorate


def mutating(namespace: str, schema: str) -> Callable[[Function], Function]:
    """Register the decorated function as a torch op that writes to arguments and returns None.

    Args:
        namespace: the namespace of the torch op.
        schema: the schema of the torch op, including its name.
    """
    name = schema.partition("(")[0]

    def wrap(function: Function) -> Function:
        library: Any = new_library(namespace, name)  # define and impl are untyped in torch
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch_compat.register_fake(library, name, lambda *arguments: None)
        return cast(Function, getattr(getattr(torch.ops, namespace), name).default)

    return wrap


def new_library(namespace: str, name: str) -> Library:
    """Return a library for the torch op *name*, which is removed if the transaction fails."""
    library, label = torch_compat.new_library(namespace), f"torch op {namespace}::{name}"
    remove = partial(torch_compat.remove_ops, library)
    transaction.enter(label, _libraries, library, label, remove)
    return library


# Turn a function of a kernel library into an implementation of an op.


REGISTERS_FOR_CALLER = True  # implementations are registered where wrap() is called

_registered: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True)
class Output:
    """A tensor that the library's function writes, and the op returns.

    Attributes:
        make: a function of some of the op's parameters, by name, that returns the tensor. Or the
            name of a parameter: a copy of it, for functions that overwrite an input.
        index: the index of the tensor in the op's results; by default, outputs are numbered in the
            order of the arguments.
    """

    make: str | Function
    index: int | None = None


@dataclass(frozen=True)
class Wrapped:
    """The function that an implementation calls, and its arguments, as given to :func:`wrap`."""

    function: ModuleFunction | FunctionByArgument | HubKernel | Function
    arguments: Sequence[object] | Mapping[str, object]

    @classmethod
    def by(cls, impl: IrOpImpl) -> Wrapped | None:
        """Return the function that *impl* wraps; None if :func:`wrap` did not register it."""
        wrapped = getattr(inspect.unwrap(impl.impl_fn), "_wrapped", None)
        return wrapped if isinstance(wrapped, cls) else None

    def named(self) -> list[ModuleFunction]:
        """Return the functions of installed packages that calls may reach."""
        if isinstance(self.function, FunctionByArgument):
            return self.function.named()
        return [self.function] if isinstance(self.function, ModuleFunction) else []


def wrap(
    op: IrOp, provider: str, function: str | FunctionByArgument | HubKernel | Function,
    arguments: Sequence[object] | Mapping[str, object], *,
    results: int | Sequence[int] | None = None, result: Function | None = None,
    supported: bool = True, unsupported_reason: str | None = None,
    supports_args: Predicate | None = None, traits: Iterable[str] = (), override: bool = False,
) -> None:  # fmt: skip
    """Register a function of a kernel library as an implementation of *op*.

    Args:
        op: the op.
        provider: the name of the library, ``[a-z_][a-z0-9_]*``.
        function: the library's function, or its name, ``"package.module:function"``. A name, a
            :class:`FunctionByArgument` and a :class:`HubKernel` are imported at the first call, and
            are unsupported if the package is not installed.
        arguments: the arguments of *function*, in order or by keyword. Each one is the name of a
            parameter of the op; an :class:`Output`; a function of some of the op's parameters, by
            name, that computes the argument; or any other object, which is passed unchanged.
        results: the positions of the op's results in the tuple that *function* returns, if the
            tuple has other elements too.
        result: a function that converts what *function* returns, or the tensors of the outputs, to
            the op's result. Its first parameter is that value, others are parameters of the op.
        supported: whether the function can run on this system.
        unsupported_reason: why it cannot.
        supports_args: a rule for the supported arguments, as for :meth:`IrOp.register_impl`.
        traits: the promises of the function, see :mod:`opweave.ir.rules`.
        override: replace an earlier implementation of the same provider.

    The op returns the tensors of the outputs or, without outputs, the result of *function*. For an
    empty batch, the native implementation runs instead, because many libraries cannot launch a
    kernel without blocks. Under ``torch.compile``, the implementation is opaque: it is called, not
    traced.

    Raises:
        InvalidOpError: an argument is not a parameter of the op, or the outputs do not match the
            op's results.
        DuplicateImplError: the op already has an implementation from that provider.
    """
    code = _Code(op)
    named = ModuleFunction(function) if isinstance(function, str) else function
    if isinstance(named, ModuleFunction | FunctionByArgument | HubKernel):
        code.names["_load"] = cache(named.load)
        obstacle = named.obstacle() if supported else None
        supported, unsupported_reason = supported and not obstacle, obstacle or unsupported_reason
    else:
        code.names["_function"] = named
    called = "_load()" if "_load" in code.names else "_function"
    if isinstance(named, FunctionByArgument):
        called = f"{called}[{code.parameter(named.parameter)}]"
    call = code.call(called, arguments)
    if results is not None:
        call = f"_pick({call})"
        code.names["_pick"] = itemgetter(*([results] if isinstance(results, int) else results))
    returned = code.results()
    body = f"({', '.join([*code.outputs, call, returned])})[-1]" if returned else call
    if result is not None:
        names = code.parameters_of(result)
        if not names:
            raise InvalidOpError(
                f"{op.name}: result= takes no value: {result!r} has no parameters."
            )
        passed = ", ".join([body, *(f"{name}={code.parameter(name)}" for name in names[1:])])
        code.names["_result"], body = result, f"_result({passed})"
    implementation: Any = op.schema.function(code.unless_empty(body), **code.names)
    implementation.__module__ = sys._getframe(1).f_globals["__name__"]
    implementation._wrapped = Wrapped(named, arguments)
    decorate = op.register_impl(
        provider,
        supported=supported,
        unsupported_reason=unsupported_reason,
        supports_args=supports_args,
        traits=traits,
        override=override,
    )
    namespace = f"{op.registry.namespace}_{provider}"
    _registered[namespace, op.name] += 1
    name = f"{op.name}_{_registered[namespace, op.name]}"
    decorate(opaque(op, namespace, name)(implementation))


class _Code:
    """The source of an implementation.

    Attributes:
        names: the objects that the source refers to.
        outputs: an expression for each output, which creates it and gives it a name.
    """

    def __init__(self, op: IrOp) -> None:
        self.op = op
        self.names: dict[str, Any] = {}
        self.outputs: list[str] = []
        self._indices: list[int | None] = []

    def call(self, function: str, arguments: Sequence[object] | Mapping[str, object]) -> str:
        if isinstance(arguments, Mapping):
            passed = [f"{name}={self._argument(argument)}" for name, argument in arguments.items()]
        else:
            passed = [self._argument(argument) for argument in arguments]
        return f"{function}({', '.join(passed)})"

    def results(self) -> str | None:
        """Return the expression for what the op returns, or None for the function's result."""
        if not self.outputs:
            return None
        schema = self.op.schema
        free = iter(i for i in range(schema.num_outputs) if i not in self._indices)
        order = [next(free, None) if i is None else i for i in self._indices]
        if {*order} != {*range(schema.num_outputs)} or len(order) != schema.num_outputs:
            raise InvalidOpError(
                f"{self.op.name}: {schema.num_outputs} Outputs are needed, one per result; found "
                f"{len(order)}, with index={self._indices}."
            )
        names = [f"_output_{order.index(i)}" for i in range(schema.num_outputs)]
        return f"({', '.join(names)},)" if schema.returns_tuple else names[0]

    def unless_empty(self, body: str) -> str:
        """Return an expression for *body*, or for the native result if the batch is empty."""
        schema = self.op.schema
        batch = next((p.name for p in schema.tensors if not p.is_optional), None)
        if batch is None:
            return body
        self.names["_native"] = self.op.native
        return f"_native({schema.call()}) if {batch}.numel() == 0 else {body}"

    def _argument(self, argument: object) -> str:
        if isinstance(argument, Output):
            name = f"_output_{len(self.outputs)}"
            value = self._argument(argument.make)
            value = f"{value}.clone()" if isinstance(argument.make, str) else value
            self.outputs.append(f"({name} := {value})")
            self._indices.append(argument.index)
            return name
        if isinstance(argument, str):
            return self.parameter(argument)
        name = f"_object_{len(self.names)}"
        self.names[name] = argument
        if not callable(argument) or isinstance(argument, Tensor):
            return name
        for parameter in self.parameters_of(argument):
            self.parameter(parameter)
        return f"{name}({named_call(argument)})"

    def parameters_of(self, function: Function) -> list[str]:
        """Return the names of a function's parameters; raise InvalidOpError if it has none."""
        try:
            return list(inspect.signature(function).parameters)
        except ValueError as error:  # a function in C without a signature
            raise InvalidOpError(
                f"{self.op.name}: the parameters of {function!r} cannot be read. Wrap it in a "
                "function that names what it takes, such as 'lambda x: torch.empty_like(x)'."
            ) from error

    def parameter(self, name: str) -> str:
        """Return *name*; raise InvalidOpError if it is not a parameter of the op."""
        parameters = self.op.schema.names
        if name not in parameters:
            raise InvalidOpError(
                f"{self.op.name}: an argument of the wrapped function is {name!r}, which is not a "
                f"parameter of the op. {did_you_mean(name, parameters)}"
            )
        return name
