"""Layers by the module names of vLLM; the classes are those of :mod:`opweave.layers`."""
