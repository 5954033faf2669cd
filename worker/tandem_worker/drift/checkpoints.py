"""Checkpoints of one side, by orbax: every slot that outlives a step, with what they may be used for.

``<folder>/<role>/<step>``. Orbax writes beside and renames, so a save that was cut off leaves the ones before it as
they were. Its files hold no checksum of the values: the digests of the slots are stored with them, and compared with
those of what was loaded.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tandem.errors import CheckpointError
from tandem.spec import RunSpec
from tandem.vocabulary import Role
from tandem_worker.chain import Plan, TensorSpec
from tandem_worker.digest import lanes_numpy
from tandem_worker.drift.saved import (
    FORMAT,
    Saved,
    check_whole,
    listing_of,
    look_into,
    read_saved,
    sizes,
    steps_in,
    training_fields,
)
from tandem_worker.model.init import Slots, rank_sharding

KEPT = 3
"""Checkpoints that a side keeps, the newest: the sides are at most one save apart."""


class Store:
    """The checkpoints of one side.

    Args:
        folder: of this side; made if it is missing.
        fields: `training_fields` of the run.
        lineage: run that began the training; a resumed run goes on with the loaded one's.
    """

    def __init__(self, folder: Path, fields: Mapping[str, str], lineage: str) -> None:
        self.folder, self.fields, self.lineage = folder, dict(fields), lineage

    def open(self, *, resume: bool, again: bool = False) -> None:
        """Look before the run starts.

        Args:
            resume: whether what is there may be an earlier run's.
            again: whether an earlier attempt of this run may have saved what is there, or never have come that far.

        Raises:
            CheckpointError: the folder cannot be used, holds another run's checkpoints, or, to resume, does not exist.
        """
        look_into(self.folder, self.fields, self.lineage, resume=resume, again=again)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("*orbax-checkpoint-tmp*"):
                shutil.rmtree(left)
        except OSError as error:
            raise CheckpointError(f"checkpoints {self.folder} cannot be written: {error.strerror}") from None

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        return steps_in(self.folder)

    def held(self) -> list[tuple[int, str]]:
        """(step, lineage) of every checkpoint."""
        return [(step, read_saved(self.folder / str(step)).lineage) for step in self.steps()]

    def save(
        self, step: int, state: Slots, digests: Mapping[str, bytes], *, suspect: Mapping[str, bytes], diverged: int
    ) -> None:
        """Write a checkpoint and drop the oldest; returns when it is on disk.

        Raises:
            CheckpointError: the disk does not take it.
        """
        saved = {
            "format": FORMAT, "step": step, "fields": self.fields, "lineage": self.lineage,
            "digests": {slot: value.hex() for slot, value in digests.items()},
            "suspect": {slot: value.hex() for slot, value in suspect.items()}, "diverged": diverged,
        }  # fmt: skip
        try:
            with _orbax() as orbax:
                orbax.save(
                    self.folder / str(step), dict(state), custom_metadata={"tandem": json.dumps(saved)}, overwrite=True
                )
            if step not in self.steps():
                raise OSError("the library says that it is saved, and it is not there")
            listing_of(self.folder / str(step)).write_text(json.dumps(sizes(self.folder / str(step))))
            for old in self.steps()[:-KEPT]:
                self._drop(old)
        except Exception as error:  # the library raises whatever its parts raise
            raise CheckpointError(f"checkpoint {self.folder / str(step)} cannot be written: {_line(error)}") from None

    def forget_after(self, step: int) -> None:
        """Drop later checkpoints: the training goes on from ``step`` and will write its own."""
        for later in self.steps():
            if later > step:
                self._drop(later)

    def forget_own(self) -> None:
        """Drop what an earlier attempt of this run saved: the training begins anew, and no side may take one of these
        for one of the new course.
        """
        for step, lineage in self.held():
            if lineage == self.lineage:
                self._drop(step)

    def _drop(self, step: int) -> None:
        shutil.rmtree(self.folder / str(step))
        listing_of(self.folder / str(step)).unlink(missing_ok=True)

    def load(self, step: int, specs: Mapping[str, TensorSpec], mesh: Any) -> tuple[Slots, Saved]:
        """The state after a step, on the mesh; the values are not checked yet.

        Raises:
            CheckpointError: it is cut off, damaged, or does not have these slots.
        """
        path = self.folder / str(step)
        saved = read_saved(path)
        check_whole(path, listed=True)
        self.lineage = saved.lineage
        return load_slots(path, specs, mesh), saved


def load_slots(path: Path, specs: Mapping[str, TensorSpec], mesh: Any) -> Slots:
    """Slots of a checkpoint.

    Raises:
        CheckpointError: as `Store.load`.
    """
    sharding = rank_sharding(mesh)
    check_whole(path)
    wanted = {
        slot: jax.ShapeDtypeStruct((mesh.size, *spec.shape), np.dtype(spec.dtype), sharding=sharding)
        for slot, spec in specs.items()
    }
    try:
        with _orbax() as orbax:
            return dict(orbax.load(path, wanted))
    except Exception as error:  # the library raises whatever its parts raise
        raise CheckpointError(f"checkpoint {path} is cut off or damaged: {_line(error)}") from None


def open_store(spec: RunSpec, role: Role, parity: Mapping[str, str], lineage: str, attempt: int = 1) -> Store | None:
    """The checkpoints of one side of a run, looked at; None if the run has none.

    Args:
        spec: the run.
        role: the side.
        parity: fields of the run.
        lineage: the run, as long as nothing is resumed.
        attempt: a later one than the first may go on from what those before it saved.

    Raises:
        CheckpointError: as `Store.open`.
    """
    if spec.checkpoints is None:
        return None
    store = Store(spec.checkpoints / role.value, training_fields(parity), lineage)
    store.open(resume=spec.resume, again=attempt > 1)
    return store


def start_slots(path: Path, plan: Plan, mesh: Any) -> Slots:
    """A checkpoint's weights with fresh moments: the training begins anew from them.

    Raises:
        CheckpointError: as `load_slots`, or the values are not those that were saved.
    """
    saved = read_saved(path)
    specs = {slot: plan.slots[slot] for slot in sorted(plan.persistent)}
    slots = load_slots(path, specs, mesh)
    for slot, array in slots.items():
        lanes = b"".join(lanes_numpy(np.asarray(part)).astype("<u4").tobytes() for part in np.asarray(array))
        if lanes.hex() != saved.digests.get(slot):
            raise CheckpointError(f"checkpoint {path} is damaged: {slot} is not what was saved")
        if slot.startswith(("mu.", "nu.")):
            slots[slot] = jnp.zeros(array.shape, array.dtype, device=array.sharding)
    return slots


_ALONE = threading.Lock()
"""The library's event loop serves one thread of a process at a time; a second save meanwhile is lost without a word."""


@contextmanager
def _orbax() -> Iterator[Any]:
    """Imported where it is used: it takes seconds."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").setLevel(logging.ERROR)
    with _ALONE:
        yield v1


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]
