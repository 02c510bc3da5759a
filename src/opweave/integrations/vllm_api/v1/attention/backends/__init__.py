"""Helpers of attention backends."""
