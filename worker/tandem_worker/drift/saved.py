"""What lies beside a checkpoint's values: which training it is of, and whether its files are all there. Without jax, so
that what cannot be used is told before a run starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError
from tandem.spec import RunSpec
from tandem.vocabulary import Role

FIELDS = ("model", "training", "seed", "tp", "weights", "data", "faults")
"""Parity fields that determine a training: a checkpoint is used by a run with the same ones only."""
START_FIELDS = ("model", "tp")
"""Those that must fit where only the weights are taken."""
FORMAT = 1
WHOLE = "orbax.checkpoint"
"""File that the library writes last."""
METADATA = "_CHECKPOINT_METADATA"
"""Where it keeps what is stored with a checkpoint."""


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


def read_saved(path: Path) -> Saved:
    """What is stored with a checkpoint.

    Raises:
        CheckpointError: there is none, or it is not one of Tandem's.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} is missing: give the folder of one step, such as .../reference/100")
    try:
        raw = json.loads(json.loads((path / METADATA).read_text())["custom_metadata"]["tandem"])
        if raw.pop("format") != FORMAT:
            raise CheckpointError(f"checkpoint {path} was written by another version of Tandem")
        saved = Saved(**raw)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"checkpoint {path} is cut off, or was not written by Tandem") from None
    if not (path / WHOLE).is_file():
        raise CheckpointError(f"checkpoint {path} is cut off, or was not written by Tandem")
    return saved


def check_fields(path: Path, saved: Saved, fields: Mapping[str, str]) -> None:
    """Whether a checkpoint fits a run.

    Raises:
        CheckpointError: names the first field that differs.
    """
    for name, value in fields.items():
        if saved.fields.get(name) != value:
            raise CheckpointError(f"checkpoint {path} is of another spec: its {name} differs from this run's")


def check_start(path: Path, fields: Mapping[str, str]) -> None:
    """Whether a run can start from a checkpoint's weights.

    Args:
        path: of the checkpoint.
        fields: parity fields of the run.

    Raises:
        CheckpointError: it is not there, cut off, or of another model.
    """
    check_fields(path, read_saved(path), {name: fields[name] for name in START_FIELDS})
    check_whole(path)


def content_digest(path: Path) -> str:
    """Digest of a checkpoint's values, part of parity where both sides start from it."""
    saved = read_saved(path)
    return hashlib.sha256(json.dumps([saved.step, saved.digests], sort_keys=True).encode()).hexdigest()


def steps_in(folder: Path) -> list[int]:
    """Steps of the whole checkpoints of one side, ascending."""
    found = (path for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if (path / WHOLE).exists())


def look_into(
    folder: Path, fields: Mapping[str, str], lineage: str = "", *, resume: bool, again: bool = False
) -> dict[int, Saved]:
    """The checkpoints of one side, by step, ascending; whether they may be this run's.

    Args:
        folder: of the side.
        fields: of the run, those of `FIELDS` that are known.
        lineage: the run, where an earlier attempt of it may have saved.
        resume: whether what is there may be an earlier run's.
        again: whether an earlier attempt of this run may have saved what is there, or never have come that far.

    Raises:
        CheckpointError: they are of another spec or an earlier run, or cannot be read; or, to resume, the folder that
            was given does not exist.
    """
    if resume and not again and not folder.parent.is_dir():
        raise CheckpointError(f"checkpoints {folder.parent} is missing: give the folder of the run to resume")
    held = {}
    for step in steps_in(folder):
        held[step] = read_saved(folder / str(step))
        check_fields(folder / str(step), held[step], fields)
    strange = [step for step, saved in held.items() if not (again and saved.lineage == lineage)]
    if strange and not resume:
        raise CheckpointError(
            f"checkpoints {folder} holds step {strange[-1]} of an earlier run: give --resume, or another folder"
        )
    return held


def with_steps_left(common: Sequence[int], steps: int | None, attempt: int = 1) -> list[int]:
    """Of the steps that both sides hold, newest first, those after which one is left to do.

    Raises:
        CheckpointError: none is, and whoever asked to resume did not ask to train it all again.
    """
    if steps is None or not common:
        return list(common)
    usable = [step for step in common if step < steps]
    if common[0] > steps or not (usable or attempt > 1):
        raise CheckpointError(f"both sides hold step {common[0]} of {steps}: nothing is left to do, give more --steps")
    return usable


def check_side(spec: RunSpec, role: Role, fields: Mapping[str, str], run: str, attempt: int) -> None:
    """What one side can tell of a run's checkpoints before it compiles.

    Args:
        spec: the run.
        role: the side.
        fields: those of `FIELDS` that are known.
        run: its UUID in hexadecimal.
        attempt: of the run.

    Raises:
        CheckpointError: as `check_start` and `look_into`.
    """
    if spec.start is not None:
        check_start(spec.start, fields)
    if spec.checkpoints is not None:
        look_into(spec.checkpoints / role.value, fields, run, resume=spec.resume, again=attempt > 1)


def check_before(spec: RunSpec, fields: Mapping[str, str]) -> None:
    """What can be told of a run's checkpoints before it starts, where both sides' lie on this machine.

    Args:
        spec: the run, a first attempt.
        fields: those of `FIELDS` that are known.

    Raises:
        CheckpointError: the run cannot start from the checkpoint that it names, or not go on from those it names.
    """
    if spec.start is not None:
        check_start(spec.start, fields)
    if spec.checkpoints is None:
        return
    folders = [spec.checkpoints / role.value for role in (Role.REFERENCE, Role.SUSPECT)]
    reference, suspect = (look_into(folder, fields, resume=spec.resume) for folder in folders)
    common = [s for s in sorted(reference, reverse=True) if s in suspect and reference[s].lineage == suspect[s].lineage]
    damaged: CheckpointError | None = None
    for step in with_steps_left(common, spec.steps):
        try:
            for folder in folders:
                check_whole(folder / str(step), listed=True)
        except CheckpointError as error:
            damaged = damaged or error
            continue
        return
    if damaged is not None:
        raise damaged


# -- files -------------------------------------------------------------------------------------------


def listing_of(path: Path) -> Path:
    """Sizes of a checkpoint's files, written behind it: the library leaves its threads behind where a file ends too
    early, so that one is not even opened.
    """
    return path.with_name(f"{path.name}.files")


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file, by its path in the folder."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def check_whole(path: Path, *, listed: bool = False) -> None:
    """Whether a checkpoint has the files that were saved.

    Args:
        path: of the checkpoint.
        listed: whether the list of its files must be there; a copy without it is left to the digests.

    Raises:
        CheckpointError: it has not.
    """
    listing = listing_of(path)
    if not listing.exists():
        if listed:
            raise CheckpointError(f"checkpoint {path} is cut off or damaged: the list of its files is missing")
        return
    try:
        found: Any = json.loads(listing.read_text())
        same = found == sizes(path)
    except (OSError, ValueError):
        same = False
    if not same:
        raise CheckpointError(f"checkpoint {path} is cut off or damaged: its files are not those that were saved")
