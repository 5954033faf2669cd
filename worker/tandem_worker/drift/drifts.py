"""Rows of drift, from sketches and from exact norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from tandem.records import DriftRecord
from tandem.vocabulary import Arm
from tandem_worker.chain import Plan
from tandem_worker.drift.sketch import Checked, Sketch, check, estimate
from tandem_worker.lockstep.ledger import Ledger
from tandem_worker.lockstep.norms import Norms

SKETCHED, EXACT = "sketch", "exact"


class Drifts:
    """Writes them down."""

    def __init__(self, ledger: Ledger, plan: Plan) -> None:
        self.ledger = ledger
        self.elements = parameter_bytes(plan) // 4
        self._checked: dict[Arm, Checked | None] = {}
        self._measured: dict[Arm, float] = {}
        """Drift at the last exact measurement."""

    def sketched(
        self, arm: Arm, step: int, sketch: Sketch, reference: Sketch, tops: Iterable[int], *, differ: bool = True,
        loss: float | None = None, grad_norm: float | None = None,
    ) -> bool:  # fmt: skip
        """Store what two sketches say, if it can be trusted; whether it can.

        Args:
            arm: whose parameters.
            step: after which.
            sketch: the arm's.
            reference: the reference's.
            tops: both sides' (`tandem_worker.drift.sketch`).
            differ: whether the parameters are known to differ, by their digests.
            loss: the arm's, where the step's own row does not hold it.
            grad_norm: the same.
        """
        checked = self._checked.get(arm)
        found = estimate(sketch, reference, tops, self.elements, differ=differ, checked=checked)
        if found.trusted:
            self._store(arm, step, "", SKETCHED, found.drift, found.norm, found.error, loss, grad_norm)
        return found.trusted

    def unknown(
        self, arm: Arm, step: int, reference: Sketch, loss: float | None = None, grad_norm: float | None = None
    ) -> None:
        """Neither the sketch nor an exact measurement can say."""
        norm = estimate(reference, reference, (), self.elements, differ=False).norm
        self._store(arm, step, "", SKETCHED, None, norm, 1.0, loss, grad_norm)

    def exact(self, arm: Arm, step: int, groups: Mapping[str, Norms]) -> None:
        """Store exact norms of the whole model and of each parameter group, of which none may be missing."""
        whole = Norms()
        for group, norms in groups.items():
            whole.merge(norms)
            self._store(arm, step, group, EXACT, _root(norms.noise), _root(norms.signal), 0.0)
        self._measured[arm] = _root(whole.noise)
        self._store(arm, step, "", EXACT, self._measured[arm], _root(whole.signal), 0.0)

    def check(self, arm: Arm, sketch: Sketch, reference: Sketch, tops: Iterable[int]) -> None:
        """Learn from the sketches of the step that was just measured exactly what later ones can be trusted in."""
        self._checked[arm] = check(sketch, reference, tops, self._measured[arm])

    def _store(
        self, arm: Arm, step: int, part: str, method: str, drift: float | None, norm: float, error: float,
        loss: float | None = None, grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        self.ledger.drift(
            DriftRecord(
                run_id=self.ledger.run_id, attempt=self.ledger.attempt, step=step, arm=arm.value, part=part,
                method=method, drift=drift, norm=norm, error=error, loss=loss, grad_norm=grad_norm,
            )
        )  # fmt: skip


def parameter_bytes(plan: Plan) -> int:
    """Bytes of the fp32 master weights of all ranks."""
    return plan.tp * sum(spec.nbytes for slot, spec in plan.slots.items() if slot.startswith("master."))


def _root(square: float) -> float:
    return float(np.sqrt(square)) if not math.isnan(square) else math.nan
