"""``python -m tandem_worker check|run|pod``.

``check`` and ``run`` are what a supervisor starts, with a spec or a `WorkerConfig` on standard input: ``check`` reads
everything that a spec names, without jax, and answers with one `Checked` or `Failed` line. ``pod`` is what a pod of a
pair starts, told by its environment and by files.
"""

from __future__ import annotations

import json
import sys

from tandem.errors import TandemError
from tandem.spec import RunSpec, model_name, validate
from tandem.worker_io import Checked, Failed, encode


def main() -> int:
    command = sys.argv[1] if len(sys.argv) == 2 else ""
    if command == "check":
        return check()
    if command == "run":
        from tandem_worker.worker import run

        run()
    if command == "pod":
        from tandem_worker.pod import pod

        pod()
    sys.stderr.write(
        "usage: python -m tandem_worker check|run, with its configuration on standard input, "
        "or pod, with its configuration in the environment\n"
    )
    return 64


def check() -> int:
    from tandem_worker.drift.saved import check_before
    from tandem_worker.prepare import Inputs

    try:
        inputs = Inputs(validate(RunSpec, json.loads(sys.stdin.read()), "spec"))
        check_before(inputs.spec, inputs.training_fields())
    except TandemError as error:
        sys.stdout.buffer.write(encode(Failed("input", str(error), error.exit_code)))
        return error.exit_code
    sys.stdout.buffer.write(encode(Checked(inputs.spec.model, model_name(inputs.spec, inputs.model))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
