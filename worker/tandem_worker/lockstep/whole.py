"""The reference's lock-step where a step is one program: parameter synchronisation (RQ2).

Tensors that differ come in pieces, so that memory is bounded by ``exchange_mib`` and one leaf of one rank. What the
update made of a wrong gradient is `derived`: stored without counts, in one row a rank, and overwritten like everything
that outlives the step. A wrong gradient itself is measured, and then dropped with the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from tandem.records import GradientRecord
from tandem.statistics.mismatch import Pieces
from tandem.vocabulary import Cause
from tandem_worker.chain import Op
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.norms import Norms
from tandem_worker.lockstep.pieces import Exchange
from tandem_worker.lockstep.reference import Reference
from tandem_worker.model.whole import is_replicated, leaf_of

GRADIENT, UPDATED = ("dw", "grad_norm"), ("param", "moment")
"""Tensor families: what a step's update is made from, and what it makes."""


class WholeReference(Reference):
    """Compares a step's gradients, parameters and moments."""

    def _replayed(self, op: Op, outputs: list[int]) -> set[int]:
        """One replay of the step replays every site: the budget only says whether there are any."""
        return set(outputs) if op.replayable and self._budget > 0 else set()

    def _wanted(self, unequal: list[tuple[int, int]]) -> list[tuple[int, int]]:  # noqa: ARG002
        """Nothing comes unasked."""
        return []

    def _keeps(self, op: Op, output: int) -> bool:
        """Whether the suspect's output must be overwritten: it outlives the step, or a control will look at it."""
        slot = op.outputs[output]
        return slot in self.plan.persistent or slot in self.machine.keep

    def _settle(
        self,
        execution: Execution,
        theirs: np.ndarray,
        unequal: list[tuple[int, int]],
        replayed: set[int],
        repeats: int,
    ) -> None:
        op = execution.op
        replays = self._replays(execution, repeats)
        derived = any(op.sites[output].family in GRADIENT for output, _ in unequal)
        norms: dict[int, Norms] = defaultdict(Norms)
        followed: dict[int, list[int]] = defaultdict(list)
        measured = [(output, rank) for output, rank in unequal if not (derived and op.sites[output].family in UPDATED)]
        exchange = Exchange(self, execution, [place for place in measured if (op.index, *place) not in self._tensors])
        for output, rank in unequal:
            site = op.sites[output]
            runs = [lanes[rank, output] for lanes in replays] if output in replayed else []
            if derived and site.family in UPDATED:
                followed[rank].append(output)
            else:
                pieces = Pieces(site.shape, np.dtype(site.dtype))
                for suspect, own in self._pieces(exchange, execution, output, rank):
                    pieces.add(suspect, own)
                    if site.family == "dw":
                        norms[output].add(suspect, own, self._weight(op, output))
                norms[output].mismatched += pieces.mismatched
                self._write(execution, output, rank, theirs, pieces.difference(), runs)
            del self._unsettled[output, rank]
        for rank, outputs in followed.items():
            # One row a rank, named by the first: a wrong gradient changes nearly every parameter and moment.
            elements = sum(op.sites[output].elements for output in outputs)
            first = outputs[0]
            self._store(execution, first, rank, Cause.DERIVED, op.sites[first].tensor, elements, {})
        if any(op.sites[output].family == "dw" for output in norms):
            self._store_noise(execution, norms, set(unequal))

    def _weight(self, op: Op, output: int) -> float:
        return 1 / self.plan.tp if is_replicated(op.sites[output]) else 1.0

    def _store_noise(self, execution: Execution, norms: dict[int, Norms], unequal: set[tuple[int, int]]) -> None:
        """A row for each leaf that differs, and one for the whole gradient."""
        whole = Norms()
        for output, site in enumerate(execution.op.sites):
            if site.family != "dw":
                continue
            found = norms[output]
            for rank in range(self.plan.tp):
                if (output, rank) not in unequal:
                    own = self.machine.shard(execution.outputs[output], rank).reshape(-1)
                    found.add_equal(own, self._weight(execution.op, output))
                    self.progress.touch()
            found.elements = self.plan.tp * site.elements
            whole.merge(found)
            if found.mismatched:
                self._noise(leaf_of(site), found)
        self._noise("", whole)

    def _noise(self, leaf: str, found: Norms) -> None:
        self.ledger.gradient(
            GradientRecord(
                run_id=self.ledger.run_id, attempt=self.ledger.attempt, step=self.step_number, leaf=leaf,
                noise=float(np.sqrt(found.noise)), signal=float(np.sqrt(found.signal)),
                suspect=float(np.sqrt(found.suspect)), cosine=found.cosine,
                elements=found.elements, mismatched=found.mismatched,
            )
        )  # fmt: skip

    # -- pieces ----------------------------------------------------------------------------------

    def _pieces(
        self, exchange: Exchange, execution: Execution, output: int, rank: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The suspect's and the own tensor of one rank, flat, piece by piece; full exchange has it already."""
        kept = self._tensors.pop((execution.op.index, output, rank), None)
        if kept is None:
            yield from exchange.pieces(output, rank)
            return
        own = self.machine.shard(execution.outputs[output], rank).reshape(-1)
        yield self._fetch(execution, "output", output, rank, kept).reshape(-1), own
