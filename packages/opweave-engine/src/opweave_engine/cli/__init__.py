"""Subcommands of ``opweave`` that run and serve models."""
