"""Deprecated alias of :mod:`opweave.base.owner`."""

from opweave.base import owner as _owner
from opweave.base.deprecation import alias_of

__getattr__ = alias_of(_owner, __name__)
