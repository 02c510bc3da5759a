"""Errors of the IR, and those of :mod:`opweave.errors`.

The messages of a call that no implementation fits are written in :mod:`opweave.ir.selection`.
"""

from __future__ import annotations

from opweave.errors import IrError as IrError
from opweave.errors import OpweaveError as OpweaveError
from opweave.errors import ReplacedWarning as ReplacedWarning
from opweave.errors import SettingWarning as SettingWarning
from opweave.errors import TransactionClosedError as TransactionClosedError
from opweave.errors import UnknownError as UnknownError
from opweave.errors import described as described
from opweave.errors import did_you_mean as did_you_mean
from opweave.errors import notes as notes


class InvalidNameError(IrError, ValueError):
    """The name of an op or provider does not match ``[a-z_][a-z0-9_]*``, or is reserved."""


class InvalidOpError(IrError, TypeError):
    """A function cannot be an op because of its signature, return type or options."""


class TensorArgumentError(IrError, TypeError):
    """A tensor parameter of an op got a value of another type."""


class InvalidResultError(IrError, TypeError):
    """The results of an implementation do not match its op's outputs."""


class DuplicateOpError(IrError, ValueError):
    """The registry already has an op of that name."""


class DuplicateImplError(IrError, ValueError):
    """The op already has an implementation from that provider."""


class SchemaMismatchError(IrError, ValueError):
    """An implementation's signature differs from its op's native implementation."""


class PredicateSignatureError(IrError, ValueError):
    """A predicate's signature differs from its op's, or a rule names an unknown parameter."""


class PredicateFailedError(IrError, RuntimeError):
    """A predicate raised, or did not return a bool."""


class UnknownOpError(UnknownError, IrError, LookupError, AttributeError):
    """No op of that name is declared."""


class DTensorError(IrError, TypeError):
    """An op that is not row-wise was called with a DTensor."""


class UnknownOpWarning(UserWarning):
    """A setting names an op that is not declared yet."""


class GradientFallbackWarning(UserWarning):
    """A kernel was passed over because gradients are needed and it is not differentiable."""


class UnknownProviderError(UnknownError, IrError, LookupError):
    """The op has no implementation from that provider."""


class UnknownTraitError(IrError, LookupError):
    """The trait does not exist."""


class ProviderUnavailableError(IrError, RuntimeError):
    """A provider marked ``name!`` cannot be used on this system."""


class ProviderRejectedError(IrError, RuntimeError):
    """A provider marked ``name!`` does not accept these arguments."""


class NoImplementationError(IrError, RuntimeError):
    """No implementation, native included, has the required traits."""


class DonationError(IrError, AttributeError):
    """``maybe_inplace`` of an op that was declared without ``allow_inplace=True``."""


class MissingToleranceError(IrError, LookupError):
    """No tolerance is defined for a dtype."""


class MissingInputGeneratorError(IrError, LookupError):
    """The op has no input generator."""


class SettingError(IrError, ValueError):
    """A setting from the command line, the environment or a file is malformed."""
