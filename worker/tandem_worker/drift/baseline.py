"""The baseline: the reference's node trains once more with another seed, so that the suspect's drift has a measure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tandem.vocabulary import Arm
from tandem_worker.drift.flight import Flight, launch, master_outputs
from tandem_worker.drift.sketch import Sketch
from tandem_worker.link import frames as f
from tandem_worker.lockstep.norms import Norms
from tandem_worker.model.plan import group_of
from tandem_worker.model.whole import GRAD_NORM, LOSS, is_replicated

if TYPE_CHECKING:
    from tandem_worker.drift.lead import DriftReferenceSession

MOST = 2048
"""Sketches that are kept at most, over the run evenly."""


class Baseline:
    """What the reference's training leaves for it, and the phase itself."""

    def __init__(self) -> None:
        self.sketches: dict[int, tuple[Sketch, list[int]]] = {}
        """Step -> the reference's sketch and largest weights."""
        self._every = 1

    def keep(self, step: int, sketch: Sketch, tops: list[int]) -> None:
        """Keep a step's sketch; beyond `MOST` only those of every second, fourth ... step."""
        if step % self._every == 0:
            self.sketches[step] = (np.array(sketch), tops)
        while len(self.sketches) > MOST:
            self._every *= 2
            self.sketches = {s: kept for s, kept in self.sketches.items() if s % self._every == 0}

    def train(self, session: DriftReferenceSession) -> None:
        """Train as many steps as the reference did, store the distance after each, and the exact one after the last.

        The suspect waits. Ends early, without the exact distance, if the run is asked to stop.
        """
        engine, machine, end = session.reference, session.machine, session.last
        assert end is not None
        seed, last = session.seed + 1, end.step
        final = {
            place: [np.array(machine.shard(end.run.outputs[place], rank)) for rank in range(session.plan.tp)]
            for place in master_outputs(end.run.op)
        }
        # Of the reference's own training only this is needed: the new one takes the place of the rest.
        session.last = end = None
        machine.slots.clear()
        machine.slots.update(session.parts.fresh(seed))
        data = session.prepared.data
        session.prepared = replace(session.prepared, data=data.reseeded(seed))
        for step in range(1, last + 1):
            engine.pump_all()
            if session.inbox.stop_reason is not None:
                return
            session.load(step)
            session.channel.send(f.Alone(step=step))
            flight = launch(engine, step)
            while flight.run.lanes is None:
                engine.pump(None)
            engine.pending.popleft()
            flight.settled()
            self._store(session, flight)
            session.progress.end_step(0.0)
            session.hooks.progress(f"baseline {step}/{last}")
            if step == last or session.parts.evaluation.due(step):
                found = session.parts.evaluation.evaluate(flight.state(session.plan.persistent))
                session.store_answers(Arm.BASELINE, step, found)
        self._exact(session, flight, final)

    def _store(self, session: DriftReferenceSession, flight: Flight) -> None:
        step = flight.step
        if step not in self.sketches:
            return
        sketch, tops = self.sketches[step]
        figures = {"loss": flight.scalar(LOSS), "grad_norm": flight.scalar(GRAD_NORM)}
        both = [*tops, *flight.tops()]
        if not session.drifts.sketched(Arm.BASELINE, step, flight.sketch(), sketch, both, differ=False, **figures):
            session.drifts.unknown(Arm.BASELINE, step, sketch, **figures)

    def _exact(self, session: DriftReferenceSession, flight: Flight, final: dict[int, list[np.ndarray]]) -> None:
        norms: dict[str, Norms] = defaultdict(Norms)
        op = flight.run.op
        for place, ranks in final.items():
            site = op.sites[place]
            weight = 1 / len(ranks) if is_replicated(site) else 1.0
            for rank, own in enumerate(ranks):
                other = session.machine.shard(flight.run.outputs[place], rank)
                norms[group_of(site.module, site.layer)].add(other.reshape(-1), own.reshape(-1), weight)
                session.progress.touch()
        session.drifts.exact(Arm.BASELINE, flight.step, norms)
