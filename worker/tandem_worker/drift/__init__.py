"""Training without synchronisation (RQ3): sketches, exact drift, checkpoints, the baseline."""
