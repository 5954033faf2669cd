"""Whatever is killed, frozen or cut off, and whenever: nothing is lost, nothing doubled, and never a false verdict."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from supervised import Home, Pair, Truth, check_rows, new_home, until
from tandem.db import embedded
from tandem.records import RunRecords
from tandem.vocabulary import AttemptState, Role, Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

QUICK = {"self_replays": 2, "replays": 1}
ROUNDS = ["reference", "suspect", "supervisor", "postgres"]
"""What a round kills: a process of the pair once, which ends the pair, PostgreSQL several times."""
POSTGRES_KILLS = 4
EARLY = ("starting", "loading", "handshake", "controls", *["step"] * 7)
TRUTH: dict[bool, Truth] = {True: {}, False: {}}
"""Of the synthetic pairs, and of the null pairs."""


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as home:
        yield home


def reach(pair: Pair, rng: random.Random, phases: tuple[str, ...]) -> None:
    """Let the pair come to a random moment of its life."""
    phase = rng.choice(phases)
    steps = rng.randint(1, 12)
    if phase == "step":
        pair.wait_for(lambda event: event.step >= steps)
    elif phase == "closing":
        pair.wait_for(lambda event: event.step >= 1)
        pair.signal(signal.SIGINT)
        late = rng.choice(("controls", "closing"))
        pair.wait_for(lambda event: event.step >= 1 and event.phase == late)
    else:
        pair.wait_for_start()
        pair.wait_for(lambda event: event.phase == phase)


def endless(home: Home) -> Pair:
    """A synthetic pair that ends only when it is told to."""
    return home.pair(fault=home.fault_profile(), steps=None, duration=3600, peer_timeout=10, **QUICK)


def recovered(home: Home, pair: Pair) -> RunRecords:
    """What is stored once the next command has run."""
    code, _, errors = home.tandem("runs")
    assert (code, errors) == (0, "")
    home.at_rest()
    assert pair.run_id is not None
    records = home.records(pair.run_id)
    check_rows(
        records, TRUTH[records.run.synthetic], max((event.records_acknowledged for event in pair.events), default=0)
    )
    return records


def kill_one(home: Home, target: str, rng: random.Random) -> None:
    pair = endless(home)
    reach(pair, rng, (*EARLY, "closing"))
    killed = pair.process.pid if target == "supervisor" else pair.workers[Role(target)]
    os.kill(killed, signal.SIGKILL)
    code = pair.end()
    records = recovered(home, pair)
    run, [attempt] = records.run, records.attempts
    assert run.state == "finished"
    if run.verdict != Verdict.INCONCLUSIVE:
        # Killed after the closing record was on its way: the records say everything.
        assert (run.verdict, attempt.state) == (Verdict.MISMATCH, AttemptState.CLOSED)
        assert records.closings[0].reason == "stopped"
    elif records.closings and records.closings[0].reason == "stopped":
        assert not records.steps[1:], "a whole attempt is inconclusive"
    else:
        assert run.reason == ("supervisor_gone" if target == "supervisor" else f"{target}_died")
    if target == "supervisor":
        assert code == -signal.SIGKILL
    else:
        assert code == {Verdict.MISMATCH: 1, Verdict.INCONCLUSIVE: 2}[Verdict(run.verdict or "")]
        assert pair.outcome == {"verdict": run.verdict, "reason": run.reason}


def kill_postgres(home: Home, rng: random.Random, times: int) -> None:
    """Killed again and again during one run, the last time when it ends, and up again a few steps later."""
    pair = endless(home)
    reach(pair, rng, EARLY)
    for left in reversed(range(times)):
        if left == 0:
            pair.wait_for(lambda event: event.step >= 1)
            pair.signal(signal.SIGINT)
        postmaster = home.postmaster()
        assert postmaster is not None
        os.kill(postmaster, signal.SIGKILL)
        if left and pair.events[-1].step:
            pair.after(rng.randint(0, 3))
        embedded.start(hold=False, home=home.folder)
        if left > 1:
            pair.after(rng.randint(0, 6))
    code = pair.end()
    if code == 1:
        assert pair.outcome == {"verdict": "mismatch", "reason": "completed"}
    else:  # the last kill met the supervisor's own transaction, or the server was not back in time
        assert code == 2, f"{pair.outcome} {pair.stderr()}"
        assert "has no verdict yet" in pair.outcome["error"]
    records = recovered(home, pair)
    [closing] = records.closings
    assert (records.run.verdict, closing.reason) == (Verdict.MISMATCH, "stopped")
    assert (closing.steps, closing.mismatches) == (len(records.steps), len(records.mismatches))


def kill(home: Home, target: str, rng: random.Random) -> None:
    """One round."""
    if target == "postgres":
        kill_postgres(home, rng, POSTGRES_KILLS)
    else:
        kill_one(home, target, rng)


def rounds(count: int) -> list[tuple[str, int]]:
    """What to kill, with the round's seed, for ``count`` kills in all."""
    plan, seed = [], 0
    while count > 0:
        target = ROUNDS[seed % len(ROUNDS)]
        plan.append((target, seed))
        count -= POSTGRES_KILLS if target == "postgres" else 1
        seed += 1
    return plan


@pytest.mark.parametrize(("target", "seed"), rounds(20))
def test_a_kill_at_a_random_moment_loses_and_doubles_nothing(home: Home, target: str, seed: int):
    rng = random.Random(f"{target}/{seed}")
    if target == "postgres":
        kill_postgres(home, rng, POSTGRES_KILLS)
    else:
        kill_one(home, target, rng)


def test_an_outage_is_ridden_out_and_the_pair_still_matches(home: Home):
    """The run goes on without its database, spools, and delivers everything once it is back."""
    pair = home.pair(kind="null", steps=40, **QUICK)
    pair.wait_for(lambda event: event.step >= 2)
    os.kill(home.postmaster() or 0, signal.SIGKILL)
    told = pair.wait_for(lambda event: event.records_spooled > 0)
    pair.wait_for(lambda event: event.step > told.step)
    pair.wait_for(lambda event: event.phase == "closing")
    assert home.spooled()
    embedded.start(hold=False, home=home.folder)
    assert pair.end() == 0, f"{pair.outcome} {pair.stderr()}"
    records = recovered(home, pair)
    assert len(records.steps) == 41
    assert pair.outcome == {"verdict": "match", "reason": "completed"}


def test_without_the_database_there_is_no_verdict_and_the_next_command_delivers(home: Home):
    pair = home.pair(kind="null", steps=4, **QUICK)
    pair.wait_for(lambda event: event.step >= 1)
    os.kill(home.postmaster() or 0, signal.SIGKILL)
    assert pair.end() == 2
    assert "has no verdict yet" in pair.outcome["error"]
    assert "\n" not in pair.outcome["error"]
    assert home.spooled()
    # Everything was written, only not to the database: once it is there the records speak for themselves.
    records = recovered(home, pair)
    assert (records.run.verdict, records.run.reason) == ("match", "completed")


@pytest.mark.parametrize("role", list(Role))
def test_a_frozen_worker_ends_the_run_by_name_and_never_in_a_match(home: Home, role: Role):
    pair = home.pair(kind="null", steps=None, duration=3600, peer_timeout=6, **QUICK)
    pair.wait_for(lambda event: event.step >= 2)
    os.kill(pair.workers[role], signal.SIGSTOP)
    frozen = time.monotonic()
    assert pair.end() == 2
    took = time.monotonic() - frozen
    assert pair.outcome == {"verdict": "inconclusive", "reason": "half_open_link"}
    assert took < 180
    assert recovered(home, pair).run.verdict == "inconclusive"


def test_workers_end_with_a_supervisor_that_dies_while_they_compile(home: Home):
    pair = endless(home)
    pair.wait_for_start()
    os.kill(pair.process.pid, signal.SIGKILL)
    pair.end()
    until(lambda: all("tandem_worker" not in " ".join(p.cmdline()) for p in home.processes()), "a worker lives on")
    records = recovered(home, pair)
    assert (records.run.verdict, records.run.reason) == ("inconclusive", "supervisor_gone")
