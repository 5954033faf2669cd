"""The process's environment and devices: what must be set before jax is imported, and what was found."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    import jax

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


DRIVER = "libcuda.so.1"


def device_names(devices: Iterable[jax.Device]) -> list[str]:
    """What node profiles know devices by: the UUID where the driver tells one, else what jax calls them (``cuda:3``).

    A UUID stays with the device, whatever its slot and whichever devices a process sees; numbers do not.
    """
    return [
        (nvidia_uuid(device.local_hardware_id) if device.platform in ("gpu", "cuda") else None) or str(device)
        for device in devices
    ]


def nvidia_uuid(ordinal: int, library: str = DRIVER) -> str | None:
    """``GPU-...`` or, of a part of a partitioned GPU, ``MIG-...``, as ``nvidia-smi -L`` prints it; None: not told.

    By the driver that jax itself uses (CUDA driver API, cuDeviceGetUuid and cuDeviceGetUuid_v2), so that the ordinal
    means the same device whatever CUDA_VISIBLE_DEVICES says.

    Args:
        ordinal: the process's number of the device; negative: unknown.
        library: the driver.
    """
    try:
        driver = ctypes.CDLL(library)
        device, whole, part = ctypes.c_int(), (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
        if ordinal < 0 or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)):
            return None
        if driver.cuDeviceGetUuid_v2(ctypes.byref(part), device):
            return None
        partitioned = not driver.cuDeviceGetUuid(ctypes.byref(whole), device) and bytes(whole) != bytes(part)
    except (OSError, AttributeError):  # no driver, or one from before these functions
        return None
    return f"{'MIG' if partitioned else 'GPU'}-{UUID(bytes=bytes(part))}" if any(part) else None
