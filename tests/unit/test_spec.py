"""What a run spec accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.errors import SpecError
from tandem.spec import ModelConfig, RunSpec, choose_preset, load_preset, model_name, preset_names, resolve, validate

LIMITS = {
    "steps": (1, 2**31 - 1),
    "window": (1, 65_536),
    "replays": (1, 64),
    "replay_budget": (0, 65_536),
    "self_replays": (2, 1024),
    "row_cap": (1, 100_000_000),
}


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_lie_between_their_limits(name: str) -> None:
    low, high = LIMITS[name]
    for value in (low, high):
        assert getattr(RunSpec.model_validate({name: value}), name) == value
    for value in (low - 1, high + 1, 10**30, -1):
        with pytest.raises(SpecError, match=f"option: {name}: Input should be") as error:
            validate(RunSpec, {name: value}, "option")
        assert error.value.exit_code == 64


@pytest.mark.parametrize("name", ["duration", "step_timeout", "peer_timeout"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_times_are_finite_and_positive(name: str, value: float) -> None:
    with pytest.raises(SpecError, match=f"option: {name}: Input should be"):
        validate(RunSpec, {name: value}, "option")


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, 20),
        ({"duration": 3600}, None),
        ({"duration": 3600, "steps": None}, None),
        ({"duration": 3600, "steps": 7}, 7),
        ({"duration": None}, 20),
    ],
)
def test_a_duration_without_steps_runs_by_time(fields: dict[str, Any], steps: int | None) -> None:
    for spec in (RunSpec(**fields), RunSpec.model_validate(fields)):
        assert spec.steps == steps
        assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("what", ["spec", "spec run.yaml", "option"])
def test_a_run_without_end_is_refused(what: str) -> None:
    """What concerns no single field says once where it was found."""
    with pytest.raises(SpecError) as error:
        validate(RunSpec, {"steps": None}, what)
    assert str(error.value) == f"{what}: give steps or duration, else the run never ends"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"checkpoint_every": 5}, "checkpoint_every needs checkpoints"),
        ({"resume": True}, "resume needs checkpoints"),
        ({"start": "/a", "weights": "/b"}, "give start or weights, not both"),
        ({"baseline": "other"}, "baseline: Input should be 'seed'"),
        ({"exact_every": 0}, "exact_every: Input should be greater than 0"),
        ({"workload": "submodule", "baseline": "seed"}, "baseline belongs to workload training"),
        ({"workload": "gradient", "checkpoints": "/a"}, "checkpoints belongs to workload training"),
        ({"workload": "submodule", "exchange_mib": 1}, "exchange_mib belongs to workload gradient"),
        ({"sync": "full"}, "sync belongs to workload submodule or gradient, this one is training"),
        ({"workload": "finetune", "questions": ["/q.jsonl"], "sync": "digest"}, "sync belongs to workload submodule"),
    ],
)
def test_fields_of_a_training_that_do_not_fit_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        validate(RunSpec, {"workload": "training"} | fields, "option")


WEIGHTS = Path("/weights")


@pytest.mark.parametrize("name", preset_names())
def test_weights_take_the_preset_that_has_their_model(name: str) -> None:
    own = load_preset(name).model.model_copy(update={"name": "llama", "init_std": 1.0})
    chosen = choose_preset(RunSpec(weights=WEIGHTS), own)
    assert (chosen.model, model_name(chosen, own)) == (name, name)
    assert resolve(chosen.model_copy(update={"tp": 1}), own)[1] == load_preset(name).training


@pytest.mark.parametrize("field", sorted(set(ModelConfig.model_fields) - {"name", "init_std"}))
def test_a_run_with_weights_of_another_model_is_never_called_like_a_preset(field: str) -> None:
    tiny = load_preset("tiny").model
    other = {"tied": not tiny.tied, "rope_scaling": {"factor": 8.0}, "sliding_window": 3}
    value = other[field] if field in other else 2 * getattr(tiny, field)
    model = tiny.model_copy(update={"name": "llama", field: value})
    with pytest.raises(SpecError, match=r"no preset has this model \(llama\): name the one .* with --model"):
        choose_preset(RunSpec(weights=WEIGHTS), model)
    for asked in preset_names():
        spec = RunSpec(weights=WEIGHTS, model=asked)
        assert choose_preset(spec, model) == spec
        assert model_name(spec, model) == f"llama (shape of {asked})"


def test_without_weights_the_model_is_the_presets() -> None:
    for spec in (RunSpec(), RunSpec(model="small")):
        assert choose_preset(spec, None) == spec
        assert model_name(spec, load_preset(spec.model).model) == spec.model
