"""Events of runs as they happen."""
