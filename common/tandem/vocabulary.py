"""The words of Tandem, as enumerations; every record, frame and page uses these and no others."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Which side of the pair a worker is."""

    REFERENCE = "reference"
    SUSPECT = "suspect"


class Kind(StrEnum):
    """Kind of a run: the ordinary pair, two healthy nodes, or the suspect with another reference."""

    SUSPECT = "suspect"
    NULL = "null"
    SWAP = "swap"


class Workload(StrEnum):
    """What the pair runs: lock-step (RQ1), gradient noise (RQ2), drift (RQ3)."""

    SUBMODULE = "submodule"
    GRADIENT = "gradient"
    TRAINING = "training"
    FINETUNE = "finetune"


UNSYNCHRONISED = (Workload.TRAINING, Workload.FINETUNE)
"""Nothing is made equal in their steps: what differs once differs from then on."""


class SyncMode(StrEnum):
    """How the two sides are kept equal; ``none`` exists for the benchmark's baseline only."""

    FULL = "full"
    DIGEST = "digest"
    OPTIMISTIC = "optimistic"
    NONE = "none"


class Phase(StrEnum):
    FWD = "fwd"
    BWD = "bwd"
    UPDATE = "update"


class Module(StrEnum):
    EMBED = "embed"
    ATTN = "attn"
    FFN = "ffn"
    HEAD = "head"
    OPTIMIZER = "optimizer"


class Verdict(StrEnum):
    """Verdict of a run."""

    MATCH = "match"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"


class NodeVerdict(StrEnum):
    """Verdict of a node, from all that is recorded of it (``tandem.nodes.verdict``)."""

    CORRUPTING = "corrupting"
    SUSPECTED = "suspected"
    CLEAN = "clean"
    UNKNOWN = "unknown"


class NodeAction(StrEnum):
    """What a person may decide about a node."""

    CLEAR = "clear"


CLEARED = "cleared"
"""The decision that is stored in ``node_decisions``: what was found before it counts no more."""


class Cause(StrEnum):
    """Why a stored mismatch row exists.

    ``compute``: the program's output differed although its inputs were equal; the only cause
    that enters a frequency. ``state``: an input that was kept differed (a flipped buffer).
    ``digest``: the digests differed while the tensors were equal. ``derived``: follows from
    another mismatch of the same step (gradient workload): counted nowhere, overwritten like any other.
    """

    COMPUTE = "compute"
    STATE = "state"
    DIGEST = "digest"
    DERIVED = "derived"


class ReplayClass(StrEnum):
    """What the suspect's replays of a mismatching submodule showed.

    ``transient``: all right; ``intermittent``: some right; ``persistent``: the same wrong bits
    every time; ``erratic``: never right, other wrong bits; ``not_replayed``: outside the budget.
    """

    TRANSIENT = "transient"
    INTERMITTENT = "intermittent"
    PERSISTENT = "persistent"
    ERRATIC = "erratic"
    NOT_REPLAYED = "not_replayed"


class Extent(StrEnum):
    """Shape of the damage inside one rank's tensor, seen as rows (all leading axes) x columns (last axis)."""

    ELEMENT = "element"
    ROW = "row"
    COLUMN = "column"
    TILE = "tile"
    WHOLE = "whole"
    SCATTERED = "scattered"


class ControlName(StrEnum):
    """The controls without which a run may not speak (design: Trust). Each is a row."""

    PARITY = "parity"
    KNOWN_REDUCTION = "known_reduction"
    SELF_REPLAY_START = "self_replay_start"
    SELF_REPLAY_END = "self_replay_end"
    POSITIVE_START = "positive_start"
    POSITIVE_END = "positive_end"
    REPLAY_REFERENCE = "replay_reference"
    TRANSPORT = "transport"
    RESUMED = "resumed"
    """Not a check: the attempt went on from a checkpoint of the step in its row (training, fine-tuning)."""
    RUN_AHEAD = "run_ahead"
    """Not a check: how many steps ran ahead of the comparison, with the memory that decided (training, fine-tuning)."""
    CLOSING = "closing"


class Arm(StrEnum):
    """Whose parameters: the pair's two sides, or the reference node's later phase with another seed."""

    REFERENCE = "reference"
    SUSPECT = "suspect"
    BASELINE = "baseline"


class AttemptState(StrEnum):
    RUNNING = "running"
    CLOSED = "closed"
    """The closing record is stored and its counts equal the rows."""
    ORPHANED = "orphaned"
    """Ended without a closing record (killed, crashed, records not delivered)."""


REGULAR_ENDS = ("completed", "stopped")
"""Reasons of a closing record that was written at the end of a whole attempt."""

EXIT_MATCH, EXIT_MISMATCH, EXIT_INCONCLUSIVE, EXIT_USAGE = 0, 1, 2, 64
"""Exit codes of the command line."""

POD_EXIT_MATCH, POD_EXIT_MISMATCH, POD_EXIT_INCONCLUSIVE = 40, 41, 42
"""Exit codes of a worker: an uncaught exception exits 1 and must not read as a finding."""
