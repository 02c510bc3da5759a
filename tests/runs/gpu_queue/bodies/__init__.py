"""What the jobs do. Every body runs on the CPU too, in small, so that it can be tested there."""
