"""Sampling parameters, logits processors, truncation and the sampler."""
