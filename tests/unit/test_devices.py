"""What devices are called: the UUID that the driver tells, else jax's name."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tandem_worker import devices
from tandem_worker.devices import device_names, nvidia_uuid

WHOLE, PART = (UUID(int=n << 96 | 0xABC) for n in (1, 2))


class Driver:
    """The three functions of the CUDA driver, as C would fill their results in."""

    def __init__(self, seen: list[int], uuids: dict[int, tuple[UUID, UUID]], broken: str = "") -> None:
        self.seen, self.uuids, self.broken = seen, uuids, broken
        """Devices that the process sees, in its order; device -> UUID of the whole and of the part."""

    def cuInit(self, _: int) -> int:
        return 100 if self.broken == "init" else 0

    def cuDeviceGet(self, device: Any, ordinal: ctypes.c_int) -> int:
        if ordinal.value >= len(self.seen):
            return 101
        device._obj.value = self.seen[ordinal.value]
        return 0

    def cuDeviceGetUuid(self, out: Any, device: ctypes.c_int) -> int:
        out._obj[:] = list(self.uuids[device.value][0].bytes)
        return 0

    def cuDeviceGetUuid_v2(self, out: Any, device: ctypes.c_int) -> int:
        if self.broken == "uuid":
            return 1
        out._obj[:] = list(self.uuids[device.value][1].bytes)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(found: Any) -> None:
        def load(name: str) -> Any:
            if isinstance(found, Exception):
                raise found
            assert name == "libcuda.so.1"
            return found

        monkeypatch.setattr(devices.ctypes, "CDLL", load)

    return put


def test_a_gpu_is_called_by_its_uuid_whatever_its_number(driver: Any) -> None:
    driver(Driver([7, 3], {7: (WHOLE, WHOLE), 3: (WHOLE, PART)}))
    assert nvidia_uuid(0) == f"GPU-{WHOLE}"
    assert nvidia_uuid(1) == f"MIG-{PART}", "a part has a UUID of its own"
    found = [SimpleNamespace(platform="gpu", local_hardware_id=n) for n in (1, 0)]
    assert device_names(found) == [f"MIG-{PART}", f"GPU-{WHOLE}"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "found",
    [
        OSError("libcuda.so.1: cannot open shared object file"),
        SimpleNamespace(cuInit=lambda _: 0, cuDeviceGet=lambda *_: 0),
        Driver([], {}),
        Driver([1], {1: (WHOLE, WHOLE)}, "init"),
        Driver([1], {1: (WHOLE, WHOLE)}, "uuid"),
        Driver([1], {1: (UUID(int=0), UUID(int=0))}),
    ],
    ids=["no driver", "an old driver", "no such device", "no init", "no uuid", "zeros"],
)
def test_what_the_driver_does_not_tell_is_not_made_up(driver: Any, found: Any) -> None:
    driver(found)
    assert nvidia_uuid(0) is None


def test_other_devices_keep_the_name_that_jax_gives_them(driver: Any) -> None:
    import jax

    driver(AssertionError("no driver is asked for a CPU"))
    assert device_names(jax.devices()) == [str(d) for d in jax.devices()]
    driver(Driver([1], {1: (WHOLE, WHOLE)}))
    assert nvidia_uuid(-1) is None
