"""Large buffers that die go back to the system, where a large model lives; elsewhere the heap is left as it is."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from tandem_worker import heap

PROGRAM = """
import ctypes, sys
from tandem_worker.heap import prepare_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def take(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block

def resident():
    return next(int(s.split()[1]) >> 10 for s in open("/proc/self/status") if s.startswith("VmRSS:"))

libc.free(take(30 << 20))  # from now on glibc itself takes blocks of this size from the heap
prepare_heap(int(sys.argv[1]))
before = resident()
blocks = [[take(2 << 20), take(1 << 10)] for _ in range(64)]
for large, _ in blocks:
    libc.free(large)
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps its heap in another way")
@pytest.mark.parametrize(("state", "kept"), [(heap.LARGE_STATE, False), (heap.LARGE_STATE - 1, True)])
def test_dead_buffers_go_back_where_the_model_is_large(state: int, kept: bool) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(state)], capture_output=True, text=True, check=True)
    assert (int(run.stdout) > 64) == kept, f"{run.stdout} MiB of 128"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", none)
    heap.prepare_heap(heap.LARGE_STATE)
