"""Deprecated alias of :mod:`opweave.base.transaction`."""

from opweave.base import transaction as _transaction
from opweave.base.deprecation import alias_of

__getattr__ = alias_of(_transaction, __name__, {"Journal": "Transaction", "transaction": "begin"})
