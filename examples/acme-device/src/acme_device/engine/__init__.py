"""Acme's own parts of the engine, each in place of opweave's, or beside it.

The platform names the classes; opweave imports each when an engine needs it.
"""
