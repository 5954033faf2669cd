"""Which questions are held out: by a hash of the id alone. Pure.

The order of lines, other questions and the file's name change nothing, a greater share holds out all that a smaller one
does, and every run splits a file in the same way, whatever its seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tandem.errors import DataError
from tandem_worker.questions.tasks import Question, Task


def is_held_out(id_: str, percent: int) -> bool:
    """Whether a question is evaluated and never trained on: ``blake2b(id) / 2**64 < percent / 100``."""
    key = hashlib.blake2b(id_.encode(), digest_size=8, person=b"tandem held out").digest()
    return int.from_bytes(key, "little") * 100 < percent << 64


def split(tasks: Iterable[Task], percent: int) -> tuple[list[Question], list[Question]]:
    """Questions to train on, and those held out, in the tasks' order.

    Raises:
        DataError: a task has none of one of the two.
    """
    training: list[Question] = []
    held_out: list[Question] = []
    for task in tasks:
        out = [q for q in task.questions if is_held_out(q.id, percent)]
        rest = [q for q in task.questions if not is_held_out(q.id, percent)]
        if not out or not rest:
            which = "none" if not out else "each"
            raise DataError(
                f"{task.name}: {which} of its {len(task.questions)} questions is held out at {percent} %: "
                "give more questions or another --held-out-percent"
            )
        held_out += out
        training += rest
    return training, held_out
