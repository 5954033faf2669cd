"""The C library's heap, which keeps what is freed: on CPU a model's buffers lie there.

glibc hands out blocks of up to 32 MiB from one of several arenas. XLA's threads free and take whole models, each thread
from its own, so that a worker of a large model holds up to twice what lives in it. Blocks that are mapped one by
one go back to the system at once; a fresh page costs far less than what a large model computes with it.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD = -3
"""glibc's ``M_MMAP_THRESHOLD``."""
LARGE = 1 << 20
"""Bytes of a block that is mapped by itself."""
LARGE_STATE = 1 << 30
"""Bytes of a model with its moments from which on it matters; smaller ones keep the faster heap."""


def prepare_heap(state: int) -> None:
    """Give back what compiling has freed and, for a large model, have every large buffer given back when it dies.

    Args:
        state: bytes on this machine of all that outlives a step.

    Without glibc this does nothing.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        if state >= LARGE_STATE:
            libc.mallopt(MMAP_THRESHOLD, LARGE)
    except (OSError, AttributeError):
        return
