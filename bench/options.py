"""What every bench is told, and the setting that its rows show."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import msgspec

from tandem.spec import RunSpec, resolve

_LOAD = round(os.getloadavg()[0], 1)
"""Of the machine before the bench adds its own."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the measurements."""

    preset: str = "small"
    batch: int = 2
    """Half of the preset's: a step of the pair still takes more than a second on two cores."""
    tp: int = 2
    window: int = 64
    blocks: int = 16
    """Paired measurements of each comparison."""
    seed: int = 0
    rows: int = 10_000_000
    """Mismatch rows in the database of the node profiles."""

    def spec(self, **fields: Any) -> RunSpec:
        """The run spec of the measured pairs; the fewest self-replays, since controls are outside timed steps."""
        common = {"model": self.preset, "batch": self.batch, "tp": self.tp, "window": self.window, "seed": self.seed}
        return RunSpec.model_validate(common | {"kind": "null", "self_replays": 2} | fields)

    def setting(self, **more: Any) -> dict[str, Any]:
        """What a row says of the conditions under which it was measured."""
        _, training = resolve(self.spec())
        return {
            "preset": self.preset, "batch": training.batch, "sequence": training.sequence, "tp": self.tp,
            "window": self.window, "compute": training.compute, "cores": len(os.sched_getaffinity(0)),
            "jax": version("jax"), "load_before": _LOAD, **more,
        }  # fmt: skip
