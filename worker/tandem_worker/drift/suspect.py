"""The suspect's engine where nothing is synchronised: runs its steps, reports each, answers about the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.errors import LinkError
from tandem_worker.drift.flight import Flight, launch
from tandem_worker.link import frames as f
from tandem_worker.link.state import Activity
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.suspect import Suspect
from tandem_worker.lockstep.transfer import lanes_bytes, send_piece, send_tensor
from tandem_worker.model.whole import GRAD_NORM, LOSS


class DriftSuspect(Suspect):
    """Runs unsynchronised steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.flights: dict[int, Flight] = {}
        """Of which the reference may still ask."""
        self.faults: list[f.FaultEntry] = []
        self.reported: Callable[[Flight], None] = lambda _: None
        """Told after each report."""
        self.send_faults: Callable[[int, list[f.FaultEntry]], None] = lambda *_: None

    def launch(self, step: int, settled: int) -> None:
        """Start a step; the reference says which ones are settled, before this one needs their memory."""
        self.settle(settled)
        self.flights[step] = launch(self, step)

    def settle(self, last: int) -> None:
        """Steps up to ``last`` will not be asked about."""
        for step in [s for s in self.flights if s <= last]:
            self.flights.pop(step).settled()

    def digest_ready(self, execution: Execution) -> None:
        flight = self.flights.get(execution.step)
        if flight is None or flight.run is not execution:
            super().digest_ready(execution)
            return
        assert execution.lanes is not None
        self.faults = []
        self._log_faults(execution)
        self.send_faults(flight.step, self.faults)
        self.channel.send(
            f.Report(
                step=flight.step, lanes=lanes_bytes(execution.lanes), sketch=flight.sketch().astype("<i4").tobytes(),
                sketch_lanes=lanes_bytes(np.asarray(flight.sketch_digests)), tops=flight.tops(),
                 loss=flight.scalar(LOSS), grad_norm=flight.scalar(GRAD_NORM),
                busy_s=max(self.clock() - flight.started, 0.0),
            )
        )  # fmt: skip
        self.pending.remove(execution)
        self.progress.end_step(self.clock() - flight.started)
        self.reported(flight)

    def drain(self) -> None:
        """Wait until every step that was started is reported."""
        while self.pending:
            self.pump(None)

    def handle(self, frame: f.Frame, payload: np.ndarray | None) -> None:
        match frame:
            case f.Want(step=step) if step:
                send_piece(self, self._asked(step), frame)
            case f.Mismatch(step=step, repeats=repeats) if step:
                self._answer_first(self._asked(step), repeats)
            case f.InputsUnequal(step=step, unequal=unequal) if step:
                for index, rank in unequal:
                    send_tensor(self, self._asked(step), "input", index, rank)
            case f.Resend(step=step, purpose=purpose, index=index, rank=rank) if step:
                send_tensor(self, self._asked(step), purpose, index, rank)
            case _:
                super().handle(frame, payload)

    def _asked(self, step: int) -> Execution:
        if step not in self.flights:
            raise LinkError("protocol", f"asked about step {step}, which is not kept")
        return self.flights[step].run

    def _answer_first(self, execution: Execution, repeats: int) -> None:
        """The first step that differs: digests of its inputs, and its replays."""
        where: dict[str, Any] = {"step": execution.step, "op": execution.op.index, "generation": self.generation}
        self.channel.send(f.InputDigests(**where, lanes=lanes_bytes(self.machine.input_digests(execution))))
        if repeats:
            with self.progress.during(Activity.REPLAYING, f"replays of {execution.op.program}"):
                replays = [lanes_bytes(lanes) for lanes in self.machine.replay(execution, repeats)]
            self.channel.send(f.ReplayDigests(**where, lanes=replays))
