"""Tandem finds and profiles silent data corruption (SDC) in accelerator nodes.

This package holds what every part shares: vocabulary, run spec, records, verdicts,
database and command line. It imports neither jax nor kubernetes nor fastapi.
"""

__version__ = "0.1.0"
