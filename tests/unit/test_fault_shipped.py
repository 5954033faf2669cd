"""The shipped fault profiles: they load, act, and hold what was published; every value says where it is from."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from fault_samples import shipped
from tandem.errors import SpecError
from tandem.faults import files as fault_files
from tandem.faults import injection as faults
from tandem.faults.injection import FaultProfile, check_profile, load_profile, rows, state_flips
from tandem.pairrun import workload
from tandem.paper import published
from tandem.spec import load_preset
from tandem_worker.model.plan import make_plan


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.stem)
def test_shipped_profiles_load(path: Path) -> None:
    p = load_profile(path)
    assert p.name == path.stem
    assert p.description
    assert FaultProfile.model_validate_json(p.model_dump_json()) == p
    assert FaultProfile.model_validate(p.model_dump()) == p


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.stem)
def test_shipped_profiles_act_on_the_tiny_model(path: Path) -> None:
    """Soon after their onset, and not before; those of nodes that showed nothing never."""
    preset = load_preset("tiny")
    plan = make_plan(preset.model, preset.training, 2)
    p = load_profile(path)
    check_profile(p, plan.sites, 2)
    onset = min(f.onset for f in p.fault)

    def acts_in(steps: range) -> bool:
        return any(
            table[..., 1 + faults.MODE].any() or table[..., 1 + faults.AMOUNT].any()
            for step in steps
            for op in plan.ops
            for table in (rows(p, step, op.sites, 2),)
        ) or any(
            state_flips(p, step, op.sites, op.input_names, [plan.slots[s].shape for s in op.inputs], 2)
            for step in steps
            for op in plan.ops
        )

    assert acts_in(range(onset, onset + 20)) == (path.stem not in ("node-2", "node-3"))
    assert not acts_in(range(max(1, onset - 20), onset))


PAPER = [path for path in shipped() if path.stem.startswith("node-") or path.stem == "anatomy"]


@pytest.mark.parametrize("path", PAPER, ids=lambda p: p.stem)
def test_every_value_of_a_papers_node_says_where_it_comes_from(path: Path) -> None:
    for fault in load_profile(path).fault:
        assert fault.note
        missing = [name for name, origin in fault.origins().items() if origin is None]
        assert not missing


@pytest.mark.parametrize("node", published.NODES, ids=lambda n: n.name)
def test_rates_of_output_level_faults_are_the_published_frequencies(node: published.PublishedNode) -> None:
    """rate x share of time on, exactly; those of operands are fitted and measured elsewhere."""
    preset = load_preset("tiny")
    sites = make_plan(preset.model, preset.training, 2).sites
    checked = 0
    for f in load_profile(Path(node.name.replace(" ", "-"))).fault:
        partials = [s for s in sites if s.tensor in ("out", "dx") and f.selects(s)]
        chosen = {(s.phase, s.module) for s in partials} & set(published.COLUMNS)
        if f.level == "output":
            for column in chosen:
                assert (f.rate or 0) * f.share == pytest.approx(node.frequency[column], rel=1e-9)
                checked += 1
    assert checked >= 2


def test_the_anatomy_is_that_of_later_work() -> None:
    rates = {(f.kind, f.count): f.rate or 0.0 for f in load_profile(Path("anatomy")).fault}
    total, flips = sum(rates.values()), rates["flip", 1] + rates["flip", 3]
    assert rates["zero", 1] / total == pytest.approx(0.5, abs=0.01)
    assert rates["nan", 1] / total == pytest.approx(0.0101, abs=1e-4)
    assert rates["flip", 1] / flips < 0.4


def test_a_shipped_profile_may_be_named_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is a file of that name; and a PairRun's schema takes the name."""
    monkeypatch.chdir(tmp_path)
    assert fault_files.shipped_names() == [path.stem for path in shipped()]
    ours = Path(str(resources.files("tandem"))) / "fault_profiles" / "node-11.toml"
    assert load_profile(Path("node-11")) == load_profile(ours)
    pattern = workload.schema()["properties"]["fault"]["pattern"]
    for accepted in ("node-11", "/etc/faults/mine.toml"):
        assert re.search(pattern, accepted)
    for refused in ("", "../x", "a/b", "-x"):
        assert not re.search(pattern, refused)
    with pytest.raises(SpecError, match=r"node-12: No such file.*shipped one \(anatomy, bursts, demo, .*node-11, "):
        load_profile(Path("node-12"))
    (tmp_path / "node-11").write_text("x = 1")
    with pytest.raises(SpecError, match=r"name: Field required|x: Extra"):
        load_profile(Path("node-11"))
