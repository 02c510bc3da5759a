"""opweave's native operators for MindSpore, PyNative mode. Needs no torch."""
