"""Quantized safetensors checkpoints: their formats, converted to what linear layers keep."""
