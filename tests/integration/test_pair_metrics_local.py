"""A pair on one machine tells Prometheus of itself where that is asked for, and never fails for it."""

from __future__ import annotations

import re
import socket

import pytest

from prometheus import free_port, scrape
from tandem.db.liveness import host
from tandem.home import home
from tandem.progress import ProgressEvent
from tandem.spec import RunSpec
from tandem.supervisor import Local, run_local
from tandem.vocabulary import Verdict

pytestmark = pytest.mark.slow
SPEC = RunSpec(steps=3, self_replays=2)


def test_a_local_pair_is_scraped_on_this_machine_alone(database_url: str) -> None:
    port, seen = free_port(), list[str]()

    def look(event: ProgressEvent) -> None:
        if event.phase in ("step", "closed"):
            try:
                seen.append(scrape(port).decode())
            except OSError:
                assert event.phase == "closed"

    run = run_local(SPEC, Local(url=database_url, metrics_port=port, on_progress=look)).run
    assert run.verdict == Verdict.MATCH
    assert seen
    node = re.escape(host())
    labels = rf'kind="suspect",node="{node}",reference="{node}",synthetic="false",workload="submodule"'
    steps = [re.search(rf"^tandem_pair_steps_total{{{labels}}} (\S+)$", text, re.MULTILINE) for text in seen]
    assert all(steps)
    compared = r'^tandem_pair_elements_compared_total{.*module="ffn".*phase="fwd".*} [1-9]'
    assert re.search(compared, seen[-1], re.MULTILINE)
    with pytest.raises(OSError):
        scrape(port)


def test_a_port_that_is_taken_is_a_line_in_the_log_and_the_run_goes_on(database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = run_local(SPEC, Local(url=database_url, metrics_port=port)).run
    assert run.verdict == Verdict.MATCH
    log = home() / "log" / f"{run.run_id}-reference.log"
    assert f"no metrics: port {port} cannot be listened on" in log.read_text()
