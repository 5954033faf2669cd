"""Which nodes should carry a live run's marks, and what is said of everything that the API server refuses. Pure."""

from __future__ import annotations

from tandem.pairrun import names
from tandem.pairrun.status import PairRunStatus
from tandem_controller import observed
from tandem_controller.draft import Draft
from tandem_controller.observed import Observed


def keep_marks(d: Draft) -> None:
    """A run's mark is on the nodes of the attempt that goes on, and on no other: between attempts nothing runs."""
    o = d.o
    here = (d.current.suspect.node, d.current.reference.node) if d.current is not None else ()
    bare = tuple(node for node in here if node in o.node_ready and node not in o.sessions)
    if bare and o.settings.mark_nodes:
        d.do(observed.MarkNodes(bare))
    left = tuple(sorted(node for node, run in o.sessions.items() if run == str(o.run_id) and node not in here))
    if left:
        d.do(observed.UnmarkNodes(left))


def said_of_node(o: Observed, status: PairRunStatus) -> str:
    """A run's verdict, if it is one on its suspect: what a run with an injected fault finds is its own.

    Nor is it one where nobody can read any more whether there was a fault.
    """
    return status.verdict if o.spec is not None and o.spec.run.fault is None else ""


def tell_refusals(d: Draft) -> None:
    """A condition with what the API server refuses, in every state of the run; none as long as nothing was."""
    if d.o.failures:
        action, sentence = next(iter(d.o.failures.items()))
        more = f" (and {len(d.o.failures) - 1} more)" if len(d.o.failures) > 1 else ""
        d.condition(names.REFUSED, True, action, f"{sentence}{more}"[:1024])
    elif d.status.condition(names.REFUSED) is not None:
        d.condition(names.REFUSED, False, "NothingRefused", "")
