"""Acme's parts of the engine; each replaces or extends one of opweave's.

The platform names the classes; opweave imports each when an engine needs it.
"""
