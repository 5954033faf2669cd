"""The suspect's session of a training run."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import CheckpointError
from tandem.vocabulary import Role
from tandem_worker.drift.flight import Flight
from tandem_worker.drift.session import DriftSession
from tandem_worker.drift.suspect import DriftSuspect
from tandem_worker.link import frames as f
from tandem_worker.lockstep.suspect import Suspect
from tandem_worker.questions.evaluation import Scored
from tandem_worker.session.suspect import SuspectSession

ANSWERS_PER_FRAME = 500


class DriftSuspectSession(DriftSession, SuspectSession):
    """Follows the reference; trains on its own."""

    suspect: DriftSuspect
    role = Role.SUSPECT

    def _engine(self) -> type[Suspect]:
        return DriftSuspect

    def run(self) -> f.Close:
        """Run the attempt; returns the reference's closing frame.

        Raises:
            PairError: parity, link or protocol ended it early.
        """
        self.suspect.reported = self._reported
        self.suspect.send_faults = self._send_faults
        self._shake_hands()
        if self.prepared.resumes:
            self._resume()
        self._report_self_replay(1, "start")
        while True:
            frame, _ = self.suspect.expect_any(f.Begin, f.Control, f.Finish, f.Alone, f.Close)
            match frame:
                case f.Begin(step=0, sync=sync):
                    self._step(0, sync)
                case f.Begin(step=step, settled=settled):
                    self.load(step)
                    self.suspect.launch(step, settled)
                case f.Control(step=step):
                    self.suspect.drain()
                    self._control_after(step)
                case f.Finish():
                    self._finish()
                case f.Alone(step=step):
                    self.progress.begin_step(step)
                case f.Close():
                    self.channel.send(f.Bye(reason=frame.reason))
                    return frame

    def _reported(self, flight: Flight) -> None:
        self.last = flight
        self.after(flight)
        if self.inbox.stop_reason is not None:
            self.channel.send(f.Stop(reason=self.inbox.stop_reason))

    def answered(self, step: int, found: Sequence[Scored]) -> None:
        for first in range(0, len(found), ANSWERS_PER_FRAME):
            part = found[first : first + ANSWERS_PER_FRAME]
            self.channel.send(f.Answers(step=step, first=first, scores=[scored.scores for scored in part]))

    def _resume(self) -> None:
        """Say which checkpoints there are, and load what the reference says."""
        store = self.parts.store
        assert store is not None
        self.channel.send(f.Held(checkpoints=store.held()))
        while True:
            frame, _ = self.suspect.expect(f.Restore, lambda _: True)
            if not frame.step:
                store.forget_own()
                return
            try:
                self.restore(frame.step)
            except CheckpointError:
                self.channel.send(f.Restored(step=frame.step, ok=False))
                continue
            store.forget_after(frame.step)
            self.channel.send(f.Restored(step=frame.step, ok=True))
            return

    def _finish(self) -> None:
        self.suspect.drain()
        if self.last is not None:
            self.suspect.settle(self.last.step)
            self.after(self.last, last=True)
            self._control_after(self.last.step)
            self._report_self_replay(self.last.step, "end")

    def _control_after(self, step: int) -> None:
        assert self.last is not None
        output, known = self.control_values(step)
        self._control(step, self.last.run, output, known)
