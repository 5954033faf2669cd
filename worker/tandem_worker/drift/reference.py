"""The reference's engine where nothing is synchronised: compares digests, measures, never overwrites.

Step 0 is compared and repaired as everywhere. After that a step that began with equal states and whose digests differ
is replayed and measured tensor by tensor; what follows from it in later steps is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.errors import LinkError
from tandem.statistics.mismatch import Pieces, compare
from tandem.vocabulary import Cause
from tandem_worker.drift.flight import Flight, launch, master_outputs, sketch_shape
from tandem_worker.link import frames as f
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.norms import Norms
from tandem_worker.lockstep.pieces import Exchange
from tandem_worker.lockstep.reference import TRIES
from tandem_worker.lockstep.tally import StepTally
from tandem_worker.lockstep.transfer import lanes_bytes
from tandem_worker.lockstep.whole import WholeReference
from tandem_worker.model.plan import group_of

Unequal = list[tuple[int, int]]
"""(output, rank) pairs in site order."""
GroupNorms = dict[str, Norms]
"""Parameter group (``attn.3``) -> norms of its master weights and of their difference."""


class DriftReference(WholeReference):
    """Compares steps that run unsynchronised."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.flights: dict[int, Flight] = {}
        """Started and not settled, by step."""
        self.reports: dict[int, f.Report] = {}
        self.logs: dict[int, list[f.FaultEntry]] = defaultdict(list)
        self.check_log: Callable[[int, list[f.FaultEntry]], None] = lambda *_: None
        """Raises where a fault log cannot be one of the step."""
        self.questions = 0
        """How many the suspect answers each time."""
        self._answered: dict[int, list[list[float]]] = {}
        """Scores of the suspect's answers that came, by step."""
        self.loaded: dict[str, bytes] | None = None
        """After a resume: the suspect's digests at the checkpoint where they differed from the own ones, by slot."""

    def answers(self, step: int) -> list[list[float]]:
        """The suspect's scores of all questions after a step; waits for them."""
        while len(self._answered.get(step, [])) < self.questions:
            self.pump(None)
        return self._answered.pop(step)

    def launch(self, step: int) -> None:
        self.flights[step] = launch(self, step)

    def handle(self, frame: f.Frame, payload: np.ndarray | None) -> None:
        match frame:
            case f.Report(step=step):
                self._check_report(frame)
                self.progress.touch()
                self.reports[step] = frame
            case f.Answers(step=step, first=first, scores=scores):
                mine = self._answered.setdefault(step, [])
                if first != len(mine) or not scores or first + len(scores) > self.questions or len(self._answered) > 2:
                    raise LinkError("protocol", f"the suspect's answers after step {step} are not those asked for")
                self.progress.touch()
                mine += scores
            case f.FaultLog(step=step) if step in self.flights and step not in self.reports:
                self.logs[step] += frame.entries
                self.check_log(step, self.logs[step])
            case _:
                super().handle(frame, payload)

    def _check_report(self, report: f.Report) -> None:
        ranks, outputs = self.plan.tp, len(self.plan.ops[0].outputs)
        sizes = (len(report.lanes), len(report.sketch), len(report.sketch_lanes), len(report.tops))
        expected = (8 * ranks * outputs, 4 * int(np.prod(sketch_shape(ranks))), 16 * ranks, ranks)
        if report.step not in self.flights or report.step in self.reports or sizes != expected:
            raise LinkError("protocol", f"the suspect's report of step {report.step} is not one that was asked for")

    def oldest(self) -> tuple[Flight, f.Report]:
        """Wait until both sides' digests of the oldest step are here; takes it off the queue."""
        run = self.pending[0]
        while run.lanes is None or run.step not in self.reports:
            self.pump(None)
        self.pending.popleft()
        return self.flights.pop(run.step), self.reports.pop(run.step)

    def begin(self, step: int) -> None:
        """The rows that follow belong to ``step``."""
        self.step_number, self.tally = step, StepTally()
        self._budget = self.settings.replay_budget

    def unequal(self, run: Execution, theirs: np.ndarray) -> Unequal:
        """What differs, by the comparator of every workload; everything is counted as compared."""
        assert run.lanes is not None
        self._count(run)
        return [(int(o), int(r)) for o, r in np.argwhere(self.differing(run.lanes, theirs).T)]

    def count_unequal(self, run: Execution, unequal: Unequal) -> None:
        """A step after the first difference: how many tensors differ, by digest."""
        for output, _ in unequal:
            self.tally.differs(run.op.sites[output])

    # -- the first difference --------------------------------------------------------------------

    def first(self, run: Execution, theirs: np.ndarray, unequal: Unequal) -> GroupNorms:
        """Ask, replay, measure and store every tensor of the first step that differs; the norms of the parameters."""
        op = run.op
        self._unsettled = dict.fromkeys(unequal, run)
        replayed = self._replayed(op, sorted({output for output, _ in unequal}))
        repeats = self.settings.replays if replayed else 0
        self._asked, self._answers = (run.step, op.index, self.generation), []
        self._expected_answers = 2 + TRIES * (len(unequal) + len(op.inputs) * self.plan.tp)
        self.channel.send(
            f.Mismatch(step=run.step, op=op.index, generation=self.generation, wanted=[], repeats=repeats)
        )
        differing = self._unequal_inputs(run)
        replays = self._replays(run, repeats)
        if differing:
            self._store_inputs(run, differing)
        norms: GroupNorms = defaultdict(Norms)
        masters = set(master_outputs(op))
        exchange = Exchange(self, run, unequal)
        for output, rank in unequal:
            site = op.sites[output]
            pieces = Pieces(site.shape, np.dtype(site.dtype))
            for suspect, own in exchange.pieces(output, rank):
                pieces.add(suspect, own)
                if output in masters:
                    norms[group_of(site.module, site.layer)].add(suspect, own, self._weight(op, output))
            del self._unsettled[output, rank]
            found = pieces.difference()
            if differing:
                # What a changed input made of the step says nothing of the step.
                fields = found.fields() if found else {"mismatched": 0}
                self._store(run, output, rank, Cause.DERIVED, site.tensor, site.elements, fields)
            else:
                runs = [lanes[rank, output] for lanes in replays] if output in replayed else []
                self._write(run, output, rank, theirs, found, runs)
        self._asked, self._answers = None, []
        self._add_equal(run, set(unequal), norms)
        return norms

    # -- exact drift -----------------------------------------------------------------------------

    def measure(self, run: Execution, unequal: Unequal) -> GroupNorms:
        """Exact norms of the master weights after a step; what differs comes in pieces."""
        norms: GroupNorms = defaultdict(Norms)
        masters = set(master_outputs(run.op))
        places = [(output, rank) for output, rank in unequal if output in masters]
        exchange = Exchange(self, run, places)
        for output, rank in places:
            site = run.op.sites[output]
            for suspect, own in exchange.pieces(output, rank):
                norms[group_of(site.module, site.layer)].add(suspect, own, self._weight(run.op, output))
        self._add_equal(run, set(unequal), norms)
        return norms

    def _add_equal(self, run: Execution, unequal: set[tuple[int, int]], norms: GroupNorms) -> None:
        """The master weights that both sides hold alike."""
        for output in master_outputs(run.op):
            site = run.op.sites[output]
            for rank in range(self.plan.tp):
                if (output, rank) not in unequal:
                    own = self.machine.shard(run.outputs[output], rank).reshape(-1)
                    norms[group_of(site.module, site.layer)].add_equal(own, self._weight(run.op, output))
                    self.progress.touch()

    # -- loaded states ---------------------------------------------------------------------------

    def _resolve(self, execution: Execution, theirs: np.ndarray, unequal: Unequal) -> None:
        """Step 0: as everywhere; but what both sides loaded to go on from is told apart and left as it is."""
        if self.loaded is None:
            super()._resolve(execution, theirs, unequal)
            return
        op, known = execution.op, self.loaded
        fresh = [
            (o, r) for o, r in unequal if known.get(op.outputs[o], b"")[8 * r : 8 * r + 8] != lanes_bytes(theirs[r, o])
        ]
        self._asked, self._answers = (self.step_number, op.index, self.generation), []
        self._expected_answers = 2 + TRIES * len(unequal)
        self._unsettled = dict.fromkeys(fresh, execution)
        if fresh:
            self.channel.send(
                f.Mismatch(step=self.step_number, op=op.index, generation=self.generation, wanted=fresh, repeats=0)
            )
        for output, rank in unequal:
            site = op.sites[output]
            fields: dict[str, Any] = {}
            if (output, rank) in fresh:
                tensor = self._fetch(execution, "output", output, rank)
                difference = compare(tensor, self.machine.shard(execution.outputs[output], rank))
                fields = difference.fields() if difference else {"mismatched": 0}
                del self._unsettled[output, rank]
            cause = Cause.STATE if (output, rank) in fresh else Cause.DERIVED
            self._store(execution, output, rank, cause, site.tensor, site.elements, fields)
        self._count(execution)
        if fresh:
            self._resume(execution, rerun=False, rollback=False)
        else:
            # Nothing is asked: the suspect goes on as if they were equal.
            self._asked, self._answers = None, []
            self._confirm(op.index)
        self.confirm_head()
