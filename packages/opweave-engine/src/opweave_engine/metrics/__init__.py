"""Engine statistics, stat loggers and the kernel selection report."""
