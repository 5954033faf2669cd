"""Which session a workload has."""

from __future__ import annotations

from tandem.vocabulary import UNSYNCHRONISED, Workload
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.session.suspect import SuspectSession


def reference_session(workload: Workload) -> type[ReferenceSession]:
    from tandem_worker.drift.lead import DriftReferenceSession

    return DriftReferenceSession if workload in UNSYNCHRONISED else ReferenceSession


def suspect_session(workload: Workload) -> type[SuspectSession]:
    from tandem_worker.drift.follow import DriftSuspectSession

    return DriftSuspectSession if workload in UNSYNCHRONISED else SuspectSession
