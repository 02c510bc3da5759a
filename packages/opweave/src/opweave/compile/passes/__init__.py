"""The passes, one per file.

A pass is a function of a graph and a :class:`~opweave.compile.context.Context`. It changes the
graph in-place, is stateless, and is idempotent.
"""
