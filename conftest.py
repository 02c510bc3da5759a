"""Loads the fixtures of all tests, in ``tests`` and ``packages/*/tests``."""

pytest_plugins = ["support.fixtures"]
