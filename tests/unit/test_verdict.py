"""The verdict is a pure function of rows: whatever is missing makes it inconclusive, by name."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from tests.pairs import run_pair

from tandem.nodes.run_profile import profile_run
from tandem.records import ControlRecord, MismatchRecord, RunRecords
from tandem.runs.attempt import NODE_DEVICES
from tandem.runs.conclusive import REQUIRED_PARITY
from tandem.runs.summary import summarise
from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.vocabulary import Cause, ControlName, Module, Phase, Role, Verdict


@pytest.fixture(scope="module")
def clean() -> RunRecords:
    """The records of a real null pair."""
    outcome = run_pair(RunSpec(steps=2, self_replays=2, replays=2))
    assert not outcome.errors
    return outcome.records


def copy(records: RunRecords) -> RunRecords:
    return msgspec.structs.replace(
        records, steps=[*records.steps], mismatches=[*records.mismatches], controls=[*records.controls],
        faults=[*records.faults], closings=[*records.closings], attempts=[*records.attempts],
    )  # fmt: skip


def with_controls(records: RunRecords, controls: list[ControlRecord]) -> RunRecords:
    """Other control rows, with a closing record that agrees with them."""
    changed = copy(records)
    changed.controls = controls
    changed.closings = [replace(c, controls=len(controls)) for c in records.closings]
    return changed


def finding(records: RunRecords, **fields: object) -> MismatchRecord:
    row = MismatchRecord(
        run_id=records.run.run_id, attempt=1, step=1, site=3, rank=0, phase=Phase.FWD, module=Module.ATTN, layer=0,
        tensor="out", cause=Cause.COMPUTE, elements=100, mismatched=1,
    )  # fmt: skip
    return replace(row, **fields)  # type: ignore[arg-type]


def with_finding(records: RunRecords, row: MismatchRecord) -> RunRecords:
    changed = copy(records)
    changed.mismatches.append(row)
    mine = (row.attempt, row.step)
    changed.steps = [replace(s, rows=s.rows + ((s.attempt, s.step) == mine)) for s in records.steps]
    changed.closings = [
        replace(c, mismatches=1, mismatches_total=1) if c.attempt == row.attempt else c for c in records.closings
    ]
    return changed


def test_a_complete_clean_run_matches(clean: RunRecords) -> None:
    decision = decide(clean)
    assert decision.verdict is Verdict.MATCH
    assert "excluded at 95 %" in decision.sentence


@pytest.mark.parametrize(("seen", "has", "said"), [(2, None, ""), (2, 2, ""), (7, None, "7"), (7, 8, "8"), (2, 8, "8")])
def test_a_match_claims_no_device_that_did_not_compute(
    clean: RunRecords, seen: int, has: int | None, said: str
) -> None:
    """A plugin may have dropped one, or the model may be too small for all: sentence, summary and profile say so."""
    [count] = [c for c in clean.controls if c.subject == "device_count"]
    told = [replace(count, detail={"reference": str(seen)})]
    if has is not None:
        told.append(replace(count, subject=NODE_DEVICES, detail={"reference": str(has)}))
    records = with_controls(clean, [*(c for c in clean.controls if c is not count), *told])
    records.closings = [replace(c, devices=["gpu:0", "gpu:1"]) for c in records.closings]
    decision = decide(records)
    assert decision.verdict is Verdict.MATCH
    assert (f"device-hours on 2 of the node's {said} devices; " in decision.sentence) is bool(said)
    records.run = replace(records.run, verdict="match")
    missing = [line for line in summarise(records).not_checked if "of the node's" in line]
    more = f"{int(said or 0) - 2} of the node's {said} devices: compared were gpu:0, gpu:1."
    assert missing == ([more] if said else [])
    assert profile_run(records).device_count == (has or seen)


def test_removing_any_one_control_or_parity_field_makes_it_inconclusive(clean: RunRecords) -> None:
    """Row by row, although the closing record agrees with what is left."""
    assert {c.subject for c in clean.controls if c.name is ControlName.PARITY} >= set(REQUIRED_PARITY)
    for index, row in enumerate(clean.controls):
        left = clean.controls[:index] + clean.controls[index + 1 :]
        assert decide(with_controls(clean, left)).verdict is Verdict.INCONCLUSIVE, (row.name, row.role, row.subject)


def test_failing_any_one_control_is_never_a_match(clean: RunRecords) -> None:
    """A suspect that differs from itself is a finding; every other failed control leaves the run inconclusive."""
    for index, row in enumerate(clean.controls):
        failed = [*clean.controls]
        failed[index] = replace(row, ok=False)
        verdict = decide(with_controls(clean, failed)).verdict
        selfish = row.name in (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END) and row.role is Role.SUSPECT
        assert verdict is (Verdict.MISMATCH if selfish else Verdict.INCONCLUSIVE), (row.name, row.role, row.subject)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (None, "completed"),
        ({"reference": "sha256:1", "suspect": "sha256:1"}, "completed"),
        ({"reference": "sha256:1", "suspect": "sha256:2"}, "parity:image_digest"),
        ({"reference": "sha256:1"}, "parity_missing:image_digest"),
        ({"suspect": "sha256:1", "reference": ""}, "parity_missing:image_digest"),
        ({}, "parity_missing:image_digest"),
    ],
)
def test_in_a_cluster_both_pods_must_have_run_one_image(
    clean: RunRecords, images: dict[str, str] | None, reason: str
) -> None:
    """Outside a cluster (None) there is no image, and the digest of the installed files alone counts."""
    changed = copy(clean)
    changed.attempts = [replace(a, images=images) for a in clean.attempts]
    decision = decide(changed)
    assert decision.reason == reason
    assert (decision.verdict is Verdict.MATCH) == (reason == "completed")


@pytest.mark.parametrize(
    ("told", "reason"), [("suspect-1", "completed"), ("suspect-2", "parity:node"), ("", "completed")]
)
def test_in_a_cluster_the_suspect_must_run_where_it_was_placed(clean: RunRecords, told: str, reason: str) -> None:
    one_image = {"reference": "sha256:1", "suspect": "sha256:1"}
    controls = [
        replace(c, detail={**c.detail, "suspect_node": told}) if c.name is ControlName.KNOWN_REDUCTION else c
        for c in clean.controls
    ]
    changed = with_controls(clean, controls)
    assert decide(changed).reason == "completed"  # outside a cluster nobody placed it
    changed.attempts = [replace(a, images=one_image, suspect_host="suspect-1") for a in clean.attempts]
    assert decide(changed).reason == reason


def test_too_few_repeats_are_no_self_replay(clean: RunRecords) -> None:
    for name in (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END):
        short = [replace(c, repeats=1) if c.name is name else c for c in clean.controls]
        assert decide(with_controls(clean, short)).reason == f"{name}_short"


@pytest.mark.parametrize("missing", ["closings", "attempts", "steps"])
def test_without_closing_record_attempt_or_steps_nothing_is_concluded(clean: RunRecords, missing: str) -> None:
    changed = copy(clean)
    setattr(changed, missing, [])
    assert decide(changed).verdict is Verdict.INCONCLUSIVE


def test_a_lost_row_is_noticed(clean: RunRecords) -> None:
    for field in ("steps", "controls"):
        changed = copy(clean)
        setattr(changed, field, getattr(clean, field)[:-1])
        assert decide(changed).verdict is Verdict.INCONCLUSIVE
    lost = with_finding(clean, finding(clean))
    lost.mismatches.clear()
    assert decide(lost).reason == "records_missing"


def test_a_step_that_compared_nothing_is_no_match(clean: RunRecords) -> None:
    for classes in ({}, {k: replace(c, elements=0) for k, c in clean.steps[-1].classes.items()}):
        changed = copy(clean)
        changed.steps[-1] = replace(changed.steps[-1], classes=classes)
        assert decide(changed).reason == "nothing_compared"


def test_a_finding_in_a_conclusive_attempt_is_a_mismatch(clean: RunRecords) -> None:
    for cause in Cause:
        assert decide(with_finding(clean, finding(clean, cause=cause))).verdict is Verdict.MISMATCH


def test_a_tensor_that_never_came_cannot_match_nor_conclude(clean: RunRecords) -> None:
    decision = decide(with_finding(clean, finding(clean, mismatched=None)))
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "tensor_missing")


def test_a_later_clean_attempt_erases_nothing(clean: RunRecords) -> None:
    """First attempt: a finding, ended early. Second: clean and conclusive, same fingerprint."""
    two = copy(clean)
    two.attempts = [replace(clean.attempts[0], reason="dead_peer"), replace(clean.attempts[0], attempt=2)]
    two.steps += [replace(s, attempt=2) for s in clean.steps]
    two.controls += [replace(c, attempt=2) for c in clean.controls]
    two.closings += [replace(c, attempt=2) for c in clean.closings]
    assert decide(two).verdict is Verdict.MATCH
    assert decide(with_finding(two, finding(clean))).verdict is Verdict.MISMATCH
    other = copy(two)
    other.mismatches.append(finding(clean))
    other.controls = [
        replace(c, detail={"reference": "another", "suspect": "another"})
        if c.attempt == 2 and c.subject == "jaxlib"
        else c
        for c in two.controls
    ]
    assert decide(other).verdict is Verdict.INCONCLUSIVE, "the conclusive attempt ran other executables"


def test_an_attempt_that_ended_early_gives_its_reason(clean: RunRecords) -> None:
    changed = copy(clean)
    changed.closings = [replace(c, reason="half_open_link") for c in clean.closings]
    decision = decide(changed)
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "half_open_link")


def resumed(records: RunRecords, step: int) -> RunRecords:
    """The records as those of an attempt that went on from a checkpoint."""
    control = replace(
        records.controls[0], name=ControlName.RESUMED, role=Role.REFERENCE, step=step, subject="", detail={}
    )
    return with_controls(records, [*records.controls, control])


def test_a_resumed_attempts_steps_go_on_where_it_says(clean: RunRecords) -> None:
    moved = resumed(clean, 7)
    assert decide(moved).reason == "steps_missing"
    moved.steps = [replace(s, step=s.step + 7 if s.step else 0) for s in moved.steps]
    decision = decide(moved)
    assert decision.verdict is Verdict.MATCH
    assert decision.sentence.endswith("; resumed from step 7")
    moved.steps = [replace(s, step=s.step + 1 if s.step else 0) for s in moved.steps]
    assert decide(moved).reason == "steps_missing"
    assert decide(resumed(clean, 0)).verdict is Verdict.MATCH


def test_tensors_that_a_step_counts_as_different_are_never_a_match(clean: RunRecords) -> None:
    changed = copy(clean)
    name, counts = next(iter(changed.steps[1].classes.items()))
    classes = changed.steps[1].classes | {name: replace(counts, mismatched_sites=1)}
    changed.steps[1] = replace(changed.steps[1], classes=classes)
    assert decide(changed).verdict is Verdict.MISMATCH
