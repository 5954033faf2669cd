"""`tandem serve` as a process: a run from its order to its report, and what happens when somebody is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from api_server import events
from serve_process import Serving, served
from supervised import Home, new_home, until

pytestmark = pytest.mark.slow
ORDER = {"spec": {"kind": "null", "steps": 4, "self_replays": 2}}
LONG = {"spec": {"kind": "null", "steps": 1_000_000, "self_replays": 2}}


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as found:
        yield found


def supervisor(home: Home, run: str) -> psutil.Process:
    """The process that looks after a run."""
    (found,) = [p for p in home.processes() if run in p.cmdline() and "tandem_api.launch.child" in p.cmdline()]
    return found


def steps(api: Serving, run: str) -> int:
    """The last step that is stored of a run."""
    stored = api.look(run)["stored"]
    return 0 if stored is None or stored["progress"] is None else stored["progress"]["step"] or 0


def test_a_run_from_its_order_to_its_report(home: Home) -> None:
    with served(home) as api:
        assert api.token_file.stat().st_mode & 0o777 == 0o600
        run = api.launch(ORDER, **{"Idempotency-Key": "one"})
        assert api.launch(ORDER, **{"Idempotency-Key": "one"}) == run
        with api.client.stream("GET", f"/v1/runs/{run}/events") as answer:
            seen = list(events(answer.iter_lines()))
        assert seen[-1].kind == "verdict"
        verdict = seen[-1].data["verdict"]
        assert verdict in ("match", "mismatch"), seen[-1].data
        phases = [e.data["progress"]["phase"] for e in seen if e.kind == "conditions" and e.data["progress"]]
        assert phases
        assert max(e.data["step"] for e in seen if e.kind == "progress") == 4
        found = api.wait(run, "finished")
        assert found["stored"]["verdict"] == verdict
        until(lambda: api.look(run)["launch"]["state"] == "finished", "its supervisor ends")
        report = api.client.get(f"/v1/runs/{run}/report")
        assert run in report.text
        summary = api.client.get(f"/v1/runs/{run}/summary").json()
        code, out, _ = home.tandem("show", run, "--json")
        assert (code, json.loads(out)) == (0, summary)
        assert api.client.get("/v1/nodes").json()["nodes"] == [], "a pair on one host says nothing about a node"
        code, err = api.end()
        assert (code, err) == (0, "")
    home.at_rest()


def test_a_run_outlives_the_api_and_is_found_again(home: Home) -> None:
    with served(home) as api:
        run = api.launch(LONG, **{"Idempotency-Key": "k"})
        waiting = api.launch(ORDER)
        api.wait(run, "running")
        until(lambda: steps(api, run) >= 2, "two steps")
        assert api.look(waiting)["state"] == "pending"
        listed = api.client.get("/v1/runs").json()
        assert ([r["run"] for r in listed["runs"]], [r["run"] for r in listed["pending"]]) == ([run], [waiting])
        api.end(signal.SIGKILL)
        process = supervisor(home, run)
        assert process.is_running()
    with served(home) as api:
        assert supervisor(home, run).pid == process.pid, "nobody began it again"
        assert api.look(run)["launch"]["state"] == "running"
        assert api.look(waiting)["state"] == "pending"
        assert api.launch(LONG, **{"Idempotency-Key": "k"}) == run, "keys are remembered"
        answer = api.client.post(f"/v1/runs/{waiting}/cancel")
        assert answer.json()["reason"] == "cancelled"
        assert api.look(waiting)["state"] == "failed"
        for _ in range(2):  # a second wish does not kill what drains
            assert api.client.post(f"/v1/runs/{run}/cancel").status_code == 202
        found = api.wait(run, "finished")
        assert found["stored"]["attempt_list"][0]["reason"] == "stopped"
        assert found["stored"]["verdict"] == "match", found
        until(lambda: api.look(run)["launch"]["state"] == "finished", "its supervisor ends")
        assert api.client.post(f"/v1/runs/{run}/cancel").status_code == 409
        assert api.end(signal.SIGTERM)[0] == 0
    home.at_rest()


def test_a_killed_supervisor_leaves_an_inconclusive_run(home: Home) -> None:
    with served(home) as api:
        run = api.launch(LONG)
        until(lambda: steps(api, run) >= 1, "a step")
        os.kill(supervisor(home, run).pid, signal.SIGKILL)
        until(lambda: api.look(run)["launch"]["state"] != "running", "its end")
        found = api.look(run)
        assert (found["state"], found["stored"]["verdict"]) == ("finished", "inconclusive")
        following = api.launch(ORDER)
        assert api.wait(following, "finished")["stored"]["verdict"] == "match"
        api.end()


def test_inputs_that_cannot_be_used_end_with_their_one_line(home: Home) -> None:
    with served(home) as api:
        run = api.launch({"spec": {"data": ["/nowhere/at/all.txt"], "tp": 1}})
        found = api.wait(run, "failed")
        assert (found["stored"], found["launch"]["reason"]) == (None, "not_started")
        assert "/nowhere/at/all.txt" in found["launch"]["message"]
        with api.client.stream("GET", f"/v1/runs/{run}/events") as answer:
            assert [e.kind for e in events(answer.iter_lines())] == ["conditions", "failed"]
        api.end()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--host", "0.0.0.0"], 64, "only this machine"),
        (["--host", "example.com"], 64, "only this machine"),
        (["--port", "1", "--host", "127.0.0.300"], 64, "only this machine"),
        (["--db", "mysql://x"], 2, "postgresql://"),
    ],
)
def test_what_cannot_be_served_is_one_line(home: Home, arguments: list[str], code: int, words: str) -> None:
    found, out, err = home.tandem("serve", *arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert words in err


def test_a_token_that_others_can_read_is_refused_and_one_folder_is_served_once(home: Home) -> None:
    with served(home) as api:
        code, _, err = home.tandem("serve", "--port", "0")
        assert (code, err.count("\n")) == (2, 1), err
        assert "another `tandem serve`" in err
        code, _, err = home.tandem("serve", "--port", api.url.rsplit(":", 1)[1])
        assert (code, "cannot be listened on" in err) == (2, True)
        api.end()
    token = home.folder / "api-token"
    token.chmod(0o644)
    code, _, err = home.tandem("serve", "--port", "0")
    assert (code, "others can read" in err) == (2, True)
