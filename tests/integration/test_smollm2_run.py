"""An end-to-end run on real weights and real text: two worker processes, PostgreSQL, a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_inputs import english_text, smollm2_dir
from tandem.spec import RunSpec
from tandem.supervisor import Local, run_local
from tandem.vocabulary import Kind, Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_null_pair_on_smollm2_and_the_bible_matches(
    tmp_path_factory: pytest.TempPathFactory, database_url: str
) -> None:
    """Tensor parallel 3 (its KV heads), its own tokenizer; every step of both sides is the same to the bit."""
    inputs: Path = tmp_path_factory.mktemp("real")
    weights = smollm2_dir(inputs)
    spec = RunSpec(
        kind=Kind.NULL, weights=weights, tokenizer=weights / "tokenizer.json",
        data=[english_text(inputs)], tp=3, steps=2, batch=1, sequence=48, self_replays=2, replays=2,
    )  # fmt: skip
    records = run_local(spec, Local(url=database_url))
    assert records.run.verdict == Verdict.MATCH, records.run.sentence
    assert (records.run.model, records.run.spec["model"]) == ("smollm2-135m", "smollm2-135m"), "found by its config"
    losses = [s.loss_reference for s in records.steps if s.step]
    assert losses == [s.loss_suspect for s in records.steps if s.step]
    # A model that knows English: far below the log of its vocabulary (10.8).
    assert all(loss is not None and 2 < loss < 6 for loss in losses)
