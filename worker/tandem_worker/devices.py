"""The process's environment and devices: what must be set before jax is imported, and what was found."""

from __future__ import annotations

import os
from pathlib import Path

GPU_FLAGS = "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0"
"""Same bits from call to call and the same kernels on both nodes (facts: openxla/xla docs/determinism.md)."""


def prepare_environment(tp: int) -> None:
    """Set what XLA reads once: virtual CPU devices, and deterministic programs where a GPU is present.

    Flags that the user set are kept and come last, so that they win; they are part of parity.
    """
    flags = [f"--xla_force_host_platform_device_count={tp}"]
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists():
        flags.append(GPU_FLAGS)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # XLA:CPU runs the ranks of one launch, and the dispatch of the next, on one pool: with fewer than two threads per
    # rank, ranks that wait in a collective could hold every thread that the missing rank needs, for ever.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * tp)))
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")]).strip()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
