"""Attention backends, by the module names of earlier versions of vLLM."""
