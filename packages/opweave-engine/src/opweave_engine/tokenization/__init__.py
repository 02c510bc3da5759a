"""Text to token ids, and token ids back to text while they arrive."""
