"""Fault profiles and sites for their tests."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tandem.faults.injection import FaultProfile, rows
from tandem.sites import Site
from tandem.spec import validate
from tandem.vocabulary import Module, Phase

OUT = Site(4, Phase.FWD, Module.FFN, 1, "out", (8, 16), "bfloat16")
DX = Site(9, Phase.BWD, Module.ATTN, 0, "dx", (8, 16), "bfloat16")
DW = Site(10, Phase.BWD, Module.ATTN, 0, "dw.wq", (16, 8), "bfloat16")
NORM = Site(20, Phase.UPDATE, Module.OPTIMIZER, -1, "grad_norm", (), "float32")
SITES = [OUT, DX, DW, NORM]


def profile(*faults_: dict[str, Any], seed: int = 1) -> FaultProfile:
    return validate(FaultProfile, {"name": "test", "seed": seed, "fault": list(faults_)}, "profile")


def flip(**fields: Any) -> dict[str, Any]:
    return {"kind": "flip", "elements": 1, **fields}


def acts(p: FaultProfile, step: int, site: Site, tp: int = 2) -> list[int]:
    """Ranks on which something acts on the site."""
    return [int(rank) for rank in np.flatnonzero(rows(p, step, [site], tp)[:, 0, 0])]


def shipped() -> list[Path]:
    return sorted(Path(str(p)) for p in resources.files("tandem").joinpath("fault_profiles").iterdir())
