"""Adapters of installed kernel libraries, one module per provider."""
