"""Exceptions that Tandem raises on purpose. Each message is one line: the cause and the mend.

::

    TandemError
      +-- UsageError            what the user typed cannot be run (exit 64)
      |     +-- SpecError       a field of the spec, preset or fault profile is wrong
      |     +-- NothingToClearError  a node to be cleared has no finding that counts
      +-- SetupError            the machine or the inputs do not allow the run (exit 2)
      |     +-- WeightsError    weight files do not fit the model
      |     +-- DataError       data files cannot be used
      |     +-- CheckpointError a checkpoint is of another run, cut off, or not there
      |     +-- DatabaseError   the database cannot be reached or has the wrong schema
      |           +-- RunNotFoundError  no stored run has that name
      +-- PairError             the pair ended without a result (exit 2); carries a named reason
            +-- ParityError     the first field in which the sides differ
            +-- LinkError       stale, foreign, dead or half-open peer
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of all; ``str()`` is one line with the cause and, where one exists, the mend."""

    exit_code = 2


class UsageError(TandemError):
    exit_code = 64


class SpecError(UsageError):
    pass


class NothingToClearError(UsageError):
    """A node that is to be cleared has no finding that counts."""


class SetupError(TandemError):
    pass


class WeightsError(SetupError):
    pass


class DataError(SetupError):
    pass


class CheckpointError(SetupError):
    pass


class DatabaseError(SetupError):
    pass


class RunNotFoundError(DatabaseError):
    """No stored run has that name."""


class PairError(TandemError):
    """The pair ended early.

    ``reason`` is a stable snake_case name that ends up as the run's reason.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ParityError(PairError):
    def __init__(self, field: str, reference: str, suspect: str) -> None:
        super().__init__(
            f"parity:{field}",
            f"the sides differ in {field}: reference has {reference!r}, suspect has {suspect!r}",
        )
        self.field = field


class LinkError(PairError):
    pass
