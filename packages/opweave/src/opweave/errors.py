"""Errors that all packages share, and helpers for their messages.

Each message says what failed, what was given, what is accepted and how to fix it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

from opweave.registration import absences_note


class OpweaveError(Exception):
    """Base class of the errors that opweave raises for invalid input or settings.

    The message is for the user, and says how to fix the problem.
    """


class UnknownError(OpweaveError):
    """Base class of errors about a name that is not registered.

    The message also lists plugins that were not loaded, since the name may come from one of them.
    """

    def __init__(self, message: str) -> None:
        note = absences_note()
        super().__init__(message if message.endswith(note) else message + note)


class IrError(OpweaveError):
    """Base class of errors of :mod:`opweave.ir` and of registration."""


class TransactionClosedError(IrError, RuntimeError):
    """A registration was made for a transaction that has already ended."""


class SettingWarning(UserWarning):
    """A setting has no effect, because it cannot be applied or is unknown."""


class ReplacedWarning(UserWarning):
    """A plugin replaces a value that another plugin has set."""


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


_MAX_PRINTED_BITS = 128
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 100
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 10
_repr.fillvalue = "…"


def shown(value: object) -> str:
    """Return ``repr(value)``, shortened, for a message about it.

    Examples:
        >>> shown([1, "a"]), len(shown("x" * 1000)), shown(1 << 999)
        ("[1, 'a']", 98, '<an integer of 1000 bits>')
    """
    if isinstance(value, int) and value.bit_length() > _MAX_PRINTED_BITS:
        return f"<an integer of {value.bit_length()} bits>"  # Python refuses to print huge ones
    return _repr.repr(value)


def described(error: BaseException, lines: int | None = None) -> str:
    r"""Return the type, message and notes of *error* in one line.

    With *lines*, use only the first lines of the message, and one more if they end with a colon.

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
    """Return the notes of *error* in brackets, to append to its message.

    Examples:
        >>> error = ValueError("a")
        >>> error.add_note("in b")
        >>> notes(error)
        ' [in b]'
    """
    return "".join(f" [{' '.join(str(note).split())}]" for note in getattr(error, "__notes__", ()))
