"""Reads a module of vLLM-style ``CustomOp`` classes, and says what each becomes."""
