"""The version of opweave, for packages that ``opweave`` itself imports."""

__version__ = "0.1.0"
