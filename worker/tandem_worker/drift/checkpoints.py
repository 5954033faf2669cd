"""Checkpoints of one side, by orbax: every slot that outlives a step, with what they may be used for.

``<folder>/<role>/<step>``. Orbax writes beside and renames, so a save that was cut off leaves the ones before it as
they were. Its files hold no checksum of the values: the digests of the slots are stored with them, and compared with
those of what was loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from tandem_worker.model.init import Slots, rank_sharding

KEPT = 3
"""Checkpoints that a side keeps, the newest: the sides are at most one save apart."""
FIELDS = ("model", "training", "seed", "tp", "weights", "data", "faults")
"""Parity fields that determine a training: a checkpoint is used by a run with the same ones only."""
START_FIELDS = ("model", "tp")
"""Those that must fit where only the weights are taken."""
FORMAT = 1


@dataclass(frozen=True)
class Saved:
    """What is stored with a checkpoint."""

    step: int
    fields: dict[str, str]
    lineage: str
    """Run that began the training at step 0."""
    digests: dict[str, str]
    """Slot -> its ranks' digests, hexadecimal."""
    suspect: dict[str, str]
    """On the reference: the suspect's digests at that step where they differed."""
    diverged: int
    """First step that differed so far; 0: none."""


def training_fields(parity: Mapping[str, str]) -> dict[str, str]:
    return {name: parity[name] for name in FIELDS}


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
        if resume and not again and not self.folder.parent.is_dir():
            raise CheckpointError(f"checkpoints {self.folder.parent} is missing: give the folder of the run to resume")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("*orbax-checkpoint-tmp*"):
                shutil.rmtree(left)
        except OSError as error:
            raise CheckpointError(f"checkpoints {self.folder} cannot be written: {error.strerror}") from None
        strange = []
        for step in self.steps():
            saved = read_saved(self.folder / str(step))
            check_fields(self.folder / str(step), saved, self.fields)
            if not (again and saved.lineage == self.lineage):
                strange.append(step)
        if strange and not resume:
            raise CheckpointError(
                f"checkpoints {self.folder} holds step {strange[-1]} of an earlier run: "
                "give --resume, or another folder"
            )

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        found = (path for path in self.folder.iterdir() if path.name.isdecimal()) if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in found if (path / "orbax.checkpoint").exists())

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
            listing_of(self.folder / str(step)).write_text(json.dumps(_sizes(self.folder / str(step))))
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
        if not listing_of(path).exists():
            raise CheckpointError(f"checkpoint {path} is cut off or damaged: the list of its files is missing")
        self.lineage = saved.lineage
        return load_slots(path, specs, mesh), saved


def load_slots(path: Path, specs: Mapping[str, TensorSpec], mesh: Any) -> Slots:
    """Slots of a checkpoint.

    Raises:
        CheckpointError: as `Store.load`.
    """
    sharding = rank_sharding(mesh)
    if not _whole(path):
        raise CheckpointError(f"checkpoint {path} is cut off or damaged: its files are not those that were saved")
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


def check_start(path: Path, parity: Mapping[str, str]) -> None:
    """Whether a run can start from a checkpoint's weights.

    Raises:
        CheckpointError: it is not there, cut off, or of another model.
    """
    check_fields(path, read_saved(path), {name: parity[name] for name in START_FIELDS})


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


def read_saved(path: Path) -> Saved:
    """What is stored with a checkpoint.

    Raises:
        CheckpointError: there is none, or it is not one of Tandem's.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} is missing: give the folder of one step, such as .../reference/100")
    try:
        with _orbax() as orbax:
            raw = json.loads(orbax.metadata(path).custom_metadata["tandem"])
        if raw.pop("format") != FORMAT:
            raise CheckpointError(f"checkpoint {path} was written by another version of Tandem")
        return Saved(**raw)
    except CheckpointError:
        raise
    except Exception:
        raise CheckpointError(f"checkpoint {path} is cut off, or was not written by Tandem") from None


def check_fields(path: Path, saved: Saved, fields: Mapping[str, str]) -> None:
    """Whether a checkpoint fits a run.

    Raises:
        CheckpointError: names the first field that differs.
    """
    for name, value in fields.items():
        if saved.fields.get(name) != value:
            raise CheckpointError(f"checkpoint {path} is of another spec: its {name} differs from this run's")


def content_digest(path: Path) -> str:
    """Digest of a checkpoint's values, part of parity where both sides start from it."""
    saved = read_saved(path)
    return hashlib.sha256(json.dumps([saved.step, saved.digests], sort_keys=True).encode()).hexdigest()


def listing_of(path: Path) -> Path:
    """Sizes of a checkpoint's files, written behind it: the library leaves its threads behind where a file ends too
    early, so that one is not even opened.
    """
    return path.with_name(f"{path.name}.files")


def _whole(path: Path) -> bool:
    """Whether a checkpoint has the files that were saved; a copy without its listing is left to the digests."""
    listing = listing_of(path)
    try:
        return not listing.exists() or json.loads(listing.read_text()) == _sizes(path)
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file, by its path in the folder."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


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
