"""vLLM's interface of an implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opweave import ir
from opweave.ir.priority import NATIVE
from opweave_vllm.vllm_api.ir.stack import registration_stack

if TYPE_CHECKING:
    from opweave_vllm.vllm_api.ir.op import IrOp


class IrOpImpl:
    """An implementation of an op; *wrapped* is opweave's object."""

    def __init__(self, op: IrOp, wrapped: ir.IrOpImpl) -> None:
        self.op, self.wrapped = op, wrapped

    def __repr__(self) -> str:
        return f"IrOpImpl({self.op.name!r}, {self.provider!r})"

    @property
    def provider(self) -> str:
        """The provider of the kernel."""
        return self.wrapped.provider

    @property
    def impl_fn(self) -> Callable[..., Any]:
        """The registered function."""
        return self.wrapped.impl_fn

    @property
    def supported(self) -> bool:
        """Whether it can run on this system."""
        return self.wrapped.supported

    @property
    def inplace(self) -> bool:
        """Whether it may write into the op's activations."""
        return self.wrapped.inplace

    @property
    def supports_all_args(self) -> bool:
        """Whether there is no predicate."""
        return self.wrapped.supports_all_args

    def supports_args(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the predicate accepts these arguments."""
        return self.wrapped.rejection(self.op.wrapped.bind(*args, **kwargs)) is None

    def uuid(self) -> str:
        """Return a digest of the source files of the kernel and its predicate."""
        return self.wrapped.uuid()

    @property
    def _registration_stack(self) -> list[str]:
        return registration_stack(self.wrapped.site)


class Implementations(Mapping[str, IrOpImpl]):
    """The implementations of an op by provider, native first."""

    def __init__(self, op: IrOp) -> None:
        self._op = op

    def __getitem__(self, provider: str) -> IrOpImpl:
        return self._op._impl(self._op.wrapped.impls[provider])

    def __iter__(self) -> Iterator[str]:
        return iter(self._op.wrapped.impls)

    def __len__(self) -> int:
        return len(self._op.wrapped.impls)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __delitem__(self, provider: str) -> None:
        """Remove an implementation.

        Raises:
            KeyError: the op has none of this provider, or it is the native one.
        """
        if provider not in self or provider == NATIVE:
            raise KeyError(provider)
        self._op.wrapped._enter(provider, ())
