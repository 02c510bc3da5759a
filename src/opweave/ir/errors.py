"""Every error of the IR, one class per condition.

Each message says what was asked, what was found, what is possible, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from opweave.ir.owner import absences_note


class OpweaveError(Exception):
    """Base class of every error that opweave raises about what it was given.

    The message is for the user, who can mend what it names.
    """


class UnknownError(OpweaveError):
    """Base class of errors about a name that nobody has registered.

    The message goes on with the plugins that are absent, since one of them may have it.
    """

    def __init__(self, message: str) -> None:
        note = absences_note()
        super().__init__(message if message.endswith(note) else message + note)


class IrError(OpweaveError):
    """Base class of everything that :mod:`opweave.ir` raises on purpose."""


class InvalidNameError(IrError, ValueError):
    """The name of an op or provider is not of the form ``[a-z_][a-z0-9_]*``, or is reserved."""


class InvalidOpError(IrError, TypeError):
    """A function cannot be an op: its signature, return type or options do not fit."""


class InvalidArgumentError(IrError, TypeError):
    """An op is called with something that is not a tensor where it takes one."""


class InvalidResultError(IrError, TypeError):
    """An implementation returned something else than its op's outputs."""


class DuplicateOpError(IrError, ValueError):
    """An op of that name is declared already in this registry."""


class DuplicateImplError(IrError, ValueError):
    """The op has an implementation from that provider already."""


class SchemaMismatchError(IrError, ValueError):
    """An implementation's signature differs from its op's native implementation."""


class PredicateSignatureError(IrError, ValueError):
    """A predicate's signature differs from its op's, or a rule names an unknown parameter."""


class PredicateFailedError(IrError, RuntimeError):
    """A predicate raised instead of answering."""


class UnknownOpError(UnknownError, IrError, LookupError, AttributeError):
    """No op of that name is declared."""


class DTensorError(IrError, TypeError):
    """An op that is not row-wise got a DTensor."""


class UnknownOpWarning(UserWarning):
    """A setting names an op that nobody has declared yet."""


class GradientFallbackWarning(UserWarning):
    """A kernel was passed over because gradients are needed and it is not differentiable."""


class SettingWarning(UserWarning):
    """A setting cannot be followed, or means nothing, and nothing follows from it."""


class ReplacedWarning(UserWarning):
    """A plugin puts its own in the place of what another plugin has set."""


class UnknownProviderError(UnknownError, IrError, LookupError):
    """The op has no implementation from that provider."""


class UnknownTraitError(IrError, LookupError):
    """No trait of that name exists."""


class ProviderUnavailableError(IrError, RuntimeError):
    """A provider marked ``name!`` cannot be used here, whatever the arguments."""


class ProviderRejectedError(IrError, RuntimeError):
    """A provider marked ``name!`` does not accept these arguments."""


class NoImplementationError(IrError, RuntimeError):
    """No implementation, native included, has the required traits."""


class DonationError(IrError, AttributeError):
    """``maybe_inplace`` was asked of an op that was not declared with ``allow_inplace=True``."""


class MissingToleranceError(IrError, LookupError):
    """No tolerance is defined for a dtype."""


class MissingInputGeneratorError(IrError, LookupError):
    """The op has no input generator."""


class TransactionClosedError(IrError, RuntimeError):
    """Something is registered for a transaction that has ended already."""


class SettingError(IrError, ValueError):
    """A setting from the command line, the environment or a file is malformed."""


_LISTED = 12  # more names than that are not read


def did_you_mean(name: str, known: Iterable[str], unlisted: Iterable[str] = ()) -> str:
    """Return a sentence with the closest match to *name*, if there is one, and the known names.

    Of more than 12 known names, the 5 most similar are listed. The match may also come from
    *unlisted*, names that are never listed.

    Examples:
        >>> did_you_mean("rmsnorm", ["rms_norm", "linear"])
        "Did you mean 'rms_norm'? Known: linear, rms_norm."
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, [*names, *sorted(unlisted)], n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    if len(names) <= _LISTED:
        return f"{hint}Known: {', '.join(names) or 'none'}."
    similar = difflib.get_close_matches(name, names, n=5, cutoff=0.0)
    return f"{hint}Most similar of {len(names)}: {', '.join(similar)}."


def described(error: BaseException, lines: int | None = None) -> str:
    r"""Return the type of *error*, what it says, or its first *lines* lines, and notes, in a line.

    What a colon announces at the end of those lines is said, too.

    Examples:
        >>> described(ValueError("a\nb")), described(ValueError("a\nb"), 1), described(KeyError())
        ('ValueError: a b', 'ValueError: a', 'KeyError')
        >>> described(RuntimeError("backend='x' raised:\nKeyError: 'y'\nmore"), 1)
        "RuntimeError: backend='x' raised: KeyError: 'y'"
    """
    try:
        text = str(error).strip()
    except Exception:  # a plugin's own __str__ can fail, too
        text = ""
    every = text.splitlines()
    chosen = every[:lines]
    while len(chosen) < len(every) and chosen[-1].rstrip().endswith(":"):
        chosen.append(every[len(chosen)])
    said = " ".join(" ".join(chosen).split())
    return f"{type(error).__name__}{f': {said}' if said else ''}{notes(error)}"


def notes(error: BaseException) -> str:
    """Return the notes of *error* in brackets, to follow what it says.

    Examples:
        >>> error = ValueError("a")
        >>> error.add_note("in b")
        >>> notes(error)
        ' [in b]'
    """
    return "".join(f" [{' '.join(str(note).split())}]" for note in getattr(error, "__notes__", ()))
