"""What both sides' training sessions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import CheckpointError
from tandem.vocabulary import Role
from tandem_worker.drift.parts import DriftParts
from tandem_worker.link.state import Activity
from tandem_worker.lockstep import controls
from tandem_worker.model.init import step_inputs
from tandem_worker.questions.evaluation import Scored
from tandem_worker.session.common import Session

if TYPE_CHECKING:
    from tandem_worker.drift.flight import Flight
    from tandem_worker.drift.saved import Saved


class DriftSession(Session):
    """Of a reference or a suspect."""

    role: Role
    last: Flight | None = None
    """The last step that was settled (reference) or reported (suspect)."""
    _saved = 0
    _evaluated = 0

    @property
    def parts(self) -> DriftParts:
        assert self.prepared.drift is not None
        return self.prepared.drift

    def load(self, step: int) -> None:
        """Fill a step's inputs; what steps under way still need is kept with them."""
        self.machine.end_step()
        tokens, targets = self.prepared.data.batch(step)
        self.machine.slots.update(step_inputs(tokens, targets, step, self.machine.chain.mesh))

    def control_values(self, step: int) -> tuple[int, list[np.ndarray]]:
        """The positive control's output, and per rank the known tensor that stands for a stored one."""
        output = controls.updated_site(self.plan, self.seed, step)
        spec = self.machine.spec(self.plan.ops[0].outputs[output])
        return output, [controls.known_tensor(spec, self.seed, step, rank) for rank in range(self.plan.tp)]

    # -- after a step ----------------------------------------------------------------------------

    def after(self, flight: Flight, *, last: bool = False) -> None:
        """Evaluate and save what a step made, where that is due; at the end in any case."""
        step, every = flight.step, self.prepared.spec.checkpoint_every
        state = flight.state(self.plan.persistent)
        if (last or self.parts.evaluation.due(step)) and self._evaluated < step:
            self._evaluated = step
            with self.progress.during(Activity.REPLAYING, "evaluation"):
                found = self.parts.evaluation.evaluate(state)
            self.answered(step, found)
        if self.parts.store is not None and (last or (every and step % every == 0)) and self._saved < step:
            self._saved = step
            lanes = flight.run.lanes
            assert lanes is not None
            digests = {
                slot: lanes[:, output].astype("<u4").tobytes()
                for output, slot in enumerate(flight.run.op.outputs)
                if slot in state
            }
            with self.progress.during(Activity.REPLAYING, "checkpoint"):
                self.parts.store.save(step, state, digests, suspect=self.theirs(flight), diverged=self.diverged)

    def answered(self, step: int, found: Sequence[Scored]) -> None:
        """Own answers to all questions, with the parameters after a step."""
        raise NotImplementedError

    def theirs(self, flight: Flight) -> dict[str, bytes]:  # noqa: ARG002
        """The peer's digests of a step where they differ, as far as this side knows them."""
        return {}

    @property
    def diverged(self) -> int:
        """First step that differed, as far as this side knows; 0: none."""
        return 0

    # -- resuming --------------------------------------------------------------------------------

    def restore(self, step: int) -> Saved:
        """Load this side's own checkpoint of a step into the slots, and check its digests.

        Raises:
            CheckpointError: it is cut off or damaged.
        """
        store = self.parts.store
        assert store is not None
        with self.progress.during(Activity.REPLAYING, f"checkpoint of step {step}"):
            specs = {slot: self.machine.spec(slot) for slot in sorted(self.plan.persistent)}
            slots, saved = store.load(step, specs, self.machine.chain.mesh)
            for slot, array in slots.items():
                if self.machine.digest(slot, array).astype("<u4").tobytes().hex() != saved.digests.get(slot):
                    raise CheckpointError(
                        f"checkpoint {store.folder / str(step)} is damaged: {slot} is not what was saved"
                    )
                self.progress.touch()
        self.machine.slots.update(slots)
        self._saved = step
        return saved
