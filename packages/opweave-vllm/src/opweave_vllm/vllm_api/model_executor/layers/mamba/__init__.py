"""State-space layers."""
