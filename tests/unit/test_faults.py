"""Fault profiles: what is accepted, when and where a fault acts, and that every draw is a pure function."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem import fault_profile, faults, published
from tandem.errors import SpecError
from tandem.faults import FaultProfile, StateFlip, check_profile, load_profile, named_bits, no_rows, rows, state_flips
from tandem.pairrun import workload
from tandem.sites import Site
from tandem.spec import load_preset, validate
from tandem.vocabulary import Module, Phase
from tandem_worker.model.plan import make_plan

OUT = Site(4, Phase.FWD, Module.FFN, 1, "out", (8, 16), "bfloat16")
DX = Site(9, Phase.BWD, Module.ATTN, 0, "dx", (8, 16), "bfloat16")
DW = Site(10, Phase.BWD, Module.ATTN, 0, "dw.wq", (16, 8), "bfloat16")
NORM = Site(20, Phase.UPDATE, Module.OPTIMIZER, -1, "grad_norm", (), "float32")
SITES = [OUT, DX, DW, NORM]


def profile(*faults_: dict[str, Any], seed: int = 1) -> FaultProfile:
    return validate(FaultProfile, {"name": "test", "seed": seed, "fault": list(faults_)}, "profile")


def flip(**fields: Any) -> dict[str, Any]:
    return {"kind": "flip", "elements": 1, **fields}


def acts(p: FaultProfile, step: int, site: Site, tp: int = 2) -> list[int]:
    """Ranks on which something acts on the site."""
    return [int(rank) for rank in np.flatnonzero(rows(p, step, [site], tp)[:, 0, 0])]


# -- parsing -------------------------------------------------------------------------------------


def shipped() -> list[Path]:
    return sorted(Path(str(p)) for p in resources.files("tandem").joinpath("fault_profiles").iterdir())


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.stem)
def test_shipped_profiles_load(path: Path) -> None:
    p = load_profile(path)
    assert p.name == path.stem
    assert p.description
    assert FaultProfile.model_validate_json(p.model_dump_json()) == p
    assert FaultProfile.model_validate(p.model_dump()) == p


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ('name = "a"', "fault: Field required"),
        ('name = "a"\nfault = []', "fault: Tuple should have at least 1 item"),
        ('name = "a"\ncolour = 1\n[[fault]]\nkind="zero"\nrate=1', "colour: Extra inputs are not permitted"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrat=1', "fault 1 (line 2): rat: Extra inputs"),
        ('name = "a"\n[[fault]]\nkind="melt"\nrate=1', "fault 1 (line 2): kind: Input should be 'flip', 'zero'"),
        (
            'name = "a"\n[[fault]]\nkind="zero"\nrate=1.5',
            "fault 1 (line 2): rate: Input should be less than or equal to 1",
        ),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1e-12', "rate must be 0 or at least 2**-32"),
        ('name = "a"\n[[fault]]\nkind="zero"', "give rate (per element) or elements"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nelements=1', "rate or elements, not both"),
        (
            'name = "a"\n[[fault]]\nkind="zero"\nrate=1\nphase="sideways"',
            "fault 1 (line 2): phase.0: Input should be 'fwd'",
        ),
        (
            'name = "a"\n[[fault]]\nkind="zero"\nrate=1\nmodule="mlp"',
            "fault 1 (line 2): module.0: Input should be 'embed'",
        ),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\ntensor="outs"', "'outs' is no tensor: use out, reduced"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nranks=-1', "fault 1 (line 2): ranks.0: Input should be greater"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nsteps=[0]', "fault 1 (line 2): steps.0: Input should be greater"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nbits=[3]', "bits belongs to kind 'flip'"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\nbits=[32]', "bit position 32 is not a whole number from 0"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\nbits=[3, 3]', "no bit position twice"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\nbits=[]', "at least one bit position"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\nbits="high"', "'high' is no bit distribution"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\nbits={30=-1}', "weights per bit must be numbers above 0"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\nbits=[3]\ncount=2', "count is for a distribution"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\ncount=5', "fault 1 (line 2): count: Input should be less than"),
        ('name = "a"\n[[fault]]\nkind="stuck"', "needs set_bits or clear_bits"),
        ('name = "a"\n[[fault]]\nkind="stuck"\nset_bits=1\nclear_bits=1', "both set_bits and clear_bits"),
        ('name = "a"\n[[fault]]\nkind="stuck"\nset_bits=1\nlane=8\nlane_width=8', "lane must be below lane_width"),
        ('name = "a"\n[[fault]]\nkind="stuck"\nset_bits=1\nlane=1\nlane_width=6', "power of two"),
        ('name = "a"\n[[fault]]\nkind="scale"\nrate=1', "kind 'scale' needs factor"),
        ('name = "a"\n[[fault]]\nkind="scale"\nrate=1\nfactor=inf', "fault 1 (line 2): factor"),
        ('name = "a"\n[[fault]]\nkind="zero"\nelements=1\nlevel="state"', "level 'state' needs kind 'flip'"),
        ('name = "a"\n[[fault]]\nkind="flip"\nrate=1\ninput="x"', "input belongs to level 'state'"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nonset=5\nuntil=4', "until (4) is before onset (5)"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nburst={p_on=0.6,p_off=0.6}', "p_on + p_off must be at most 1"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nburst={p_on=0,p_off=0.6}', "fault 1 (line 2): burst.p_on"),
        ('name = "a"\n"b\\nc" = 1\n[[fault]]\nkind="zero"\nrate=1', "Extra inputs"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=nan', "fault 1 (line 2): rate: Input should be"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=-0.1', "fault 1 (line 2): rate: Input should be greater"),
        (
            'name = "a"\n[[fault]]\nkind="zero"\nrate=1\n\n[[fault]]\nkind="zero"\nrate=2',
            "fault 2 (line 6): rate: Input",
        ),
        ('name = "a"\nfault = [{kind="zero", rate=2}]', "fault 1: rate: Input should be less"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\ntile=[3, 4]', "fault 1 (line 2): tile.0: 3 is no power of two"),
        (
            'name = "a"\n[[fault]]\nkind="zero"\nrate=1\ntile=[8192, 4]',
            "fault 1 (line 2): tile.0: Input should be less",
        ),
        ('name = "a"\n[[fault]]\nkind="flip"\nelements=1\nlevel="state"\ntile=[1, 4]', "tile belongs to level"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nsource="guessed"', "fault 1 (line 2): source"),
        ('name = "a"\n[[fault]]\nkind="zero"\nrate=1\nsource={rat="ours"}', "'rat', which is no field of a fault"),
        ('name = "a"\nseed=-1\n[[fault]]\nkind="zero"\nrate=1', "seed: Input should be greater"),
    ],
)
def test_a_malformed_profile_is_one_line_that_names_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_profile(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_unreadable_profiles_are_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(bytes(range(256)))
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(SpecError) as caught:
            load_profile(path)
        assert "\n" not in str(caught.value)


words = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8)
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["flip", "out", "fwd"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*faults.Fault.model_fields]), junk, max_size=8))
def test_any_fault_is_either_accepted_or_refused_in_one_line(fields: dict[str, Any]) -> None:
    try:
        p = profile(fields)
    except SpecError as error:
        if "\n" in str(error):
            raise
    else:
        rows(p, 3, SITES, 2)


# -- check against the model ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([flip(layers=7)], "no site of this model is selected"),
        ([flip(ranks=[5])], r"none of its ranks \[5\] exists with tp 2"),
        ([flip(level="operand", tensor="dw")], "level 'operand' acts inside attn, ffn and head"),
        ([flip(level="operand", tensor="grad_norm")], "fault 1: level 'operand' acts inside"),
        ([flip(level="operand", tensor="out", bits=[16])], "bit 16 does not exist in bfloat16, the dtype of operands"),
        ([flip(tensor="out", bits=[30])], "bit 30 does not exist in bfloat16 of fwd/ffn layer 1 out"),
        ([flip(steps=[3])] * 5, "more than 4 faults act on one tensor at step 3"),
        ([flip(onset=2)] * 4 + [flip(steps=[1, 9])], "more than 4 faults act on one tensor at step 9"),
    ],
)
def test_profiles_that_cannot_act_as_written_are_refused_before_the_run(fields: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_profile(profile(*fields), SITES, 2)


@pytest.mark.parametrize("module", [None, "attn", "ffn", "head", "embed"])
def test_a_kept_buffer_must_be_an_input_of_a_selected_program(module: str | None) -> None:
    preset = load_preset("tiny")
    plan = make_plan(preset.model, preset.training, 2)
    inputs = {site.number: op.input_names for op in plan.ops for site in op.sites}
    where = {} if module is None else {"module": module}
    selected = [op for op in plan.ops if module is None or any(site.module == module for site in op.sites)]
    names = {name for op in selected for name in op.input_names}
    for name in sorted({n for op in plan.ops for n in op.input_names} | {"nothing"}):
        p = profile(flip(level="state", input=name, **where))
        if name in names:
            check_profile(p, plan.sites, 2, inputs)
        else:
            with pytest.raises(SpecError, match=f"fault 1: no selected program has an input '{name}': use one of"):
                check_profile(p, plan.sites, 2, inputs)


def test_good_profiles_pass_the_check() -> None:
    check_profile(profile(*[flip(steps=[n]) for n in range(1, 200)]), SITES, 2)
    check_profile(profile(flip(tensor="grad_norm", bits=[31]), flip(bits={15: 1, 0: 2})), SITES, 2)
    check_profile(profile(*[flip(until=3)] * 4, *[flip(onset=4)] * 4), SITES, 2)


# -- where and when --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, SITES),
        ({"phase": "fwd"}, [OUT]),
        ({"phase": ["bwd", "update"]}, [DX, DW, NORM]),
        ({"module": "attn"}, [DX, DW]),
        ({"tensor": "dw"}, [DW]),
        ({"tensor": "dw.wq"}, [DW]),
        ({"tensor": "dw.w"}, []),
        ({"tensor": ["out", "dx"]}, [OUT, DX]),
        ({"layers": [1, -1]}, [OUT, NORM]),
        ({"module": "ffn", "layers": 0}, []),
    ],
)
def test_selectors(selector: dict[str, Any], expected: list[Site]) -> None:
    p = profile(flip(**selector))
    assert [s for s in SITES if acts(p, 1, s)] == expected


def test_ranks_steps_onset_until() -> None:
    assert acts(profile(flip(ranks=1)), 1, OUT) == [1]
    assert acts(profile(flip()), 1, OUT, tp=3) == [0, 1, 2]
    p = profile(flip(onset=3, until=6, steps=[2, 4, 6, 8]))
    assert [step for step in range(1, 10) if acts(p, step, OUT)] == [4, 6]


def test_nothing_active_is_the_shared_zeros() -> None:
    p = profile(flip(steps=5, tensor="out"), flip(level="state", input="x"))
    assert rows(p, 4, [OUT], 2) is no_rows(2, 1)
    assert rows(p, 5, [DX, DW], 2) is no_rows(2, 2)
    assert no_rows(2, 2).shape == (2, 3, faults.WIDTH)
    assert not no_rows(2, 2).any()
    with pytest.raises(ValueError, match="read-only"):
        no_rows(2, 2)[0] = 1


def test_operand_faults_go_to_the_tap_and_select_by_the_partial() -> None:
    p = profile(flip(level="operand", tensor="dx"))
    table = rows(p, 1, [DW, DX], 2)
    assert table[:, :, 0].tolist() == [[0, 0, 1], [0, 0, 1]]
    assert rows(profile(flip(level="operand", tensor="dw")), 1, [DW, DX], 2) is no_rows(2, 2)
    assert rows(profile(flip(level="operand")), 1, [NORM], 2) is no_rows(2, 1)


def test_more_faults_than_slots_are_refused_not_dropped() -> None:
    with pytest.raises(SpecError, match="more than 4 faults act on fwd/ffn layer 1 out, step 1"):
        rows(profile(*[flip()] * 5), 1, [OUT], 2)


# -- keys ------------------------------------------------------------------------------------------


def test_draws_depend_on_everything_but_the_call_order() -> None:
    p = profile(flip(), flip(), seed=5)

    def keys(p: FaultProfile, step: int, site: Site, replay: int) -> list[bytes]:
        table = rows(p, step, [site], 2, replay)
        at = [1 + i * faults.SLOT_WORDS + faults.KEY0 for i in (0, 1)]
        return [table[rank, 0, a : a + 2].tobytes() for rank in (0, 1) for a in at]

    calls = [(step, site, replay) for step in (1, 2) for site in SITES for replay in (0, 1, 2)]
    forward = {c: keys(p, *c) for c in calls}
    backward = {c: keys(profile(flip(), flip(), seed=5), *c) for c in reversed(calls)}
    assert forward == backward
    every = [key for c in calls for key in forward[c]]
    assert len(set(every)) == len(every)
    assert set(every).isdisjoint(k for c in calls for k in keys(profile(flip(), flip(), seed=6), *c))


def test_replays_are_fresh_stuck_or_clean() -> None:
    fresh, stuck, once = (profile(flip(repeat=r)) for r in ("fresh", "stuck", "once"))
    assert not np.array_equal(rows(fresh, 1, [OUT], 2, 0), rows(fresh, 1, [OUT], 2, 1))
    assert np.array_equal(rows(stuck, 1, [OUT], 2, 0), rows(stuck, 1, [OUT], 2, 1))
    assert rows(once, 1, [OUT], 2, 1) is no_rows(2, 1)
    for p in (fresh, stuck, once):  # a roll-back runs the step again as replay 0
        assert np.array_equal(rows(p, 1, [OUT], 2, 0), rows(p, 1, [OUT], 2, 0))


# -- bursts ----------------------------------------------------------------------------------------


def burst(p_on: float, p_off: float, seed: int = 1, **more: Any) -> FaultProfile:
    return profile({"kind": "zero", "rate": 1, "burst": {"p_on": p_on, "p_off": p_off, **more}}, seed=seed)


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-3, 0.5), st.floats(1e-3, 0.5), st.integers(0, 2**62), st.randoms())
def test_burst_state_does_not_depend_on_the_order_of_questions(
    p_on: float, p_off: float, seed: int, random: Any
) -> None:
    questions = [(step, site) for step in range(1, 40) for site in (0, 1)]
    first = burst(p_on, p_off, seed)
    expected = {q: first.burst_on(0, *q) for q in questions}
    random.shuffle(questions)
    second = burst(p_on, p_off, seed)
    assert {q: second.burst_on(0, *q) for q in questions} == expected


def test_burst_statistics_are_those_of_the_two_state_chain() -> None:
    p_on, p_off, steps, sites = 0.05, 0.2, 500, 60
    p = burst(p_on, p_off)
    on = np.array([[p.burst_on(0, t, s) for t in range(1, steps + 1)] for s in range(sites)])
    share = p_on / (p_on + p_off)
    # the correlation 1 - p_on - p_off = 0.75 makes 30,000 states worth about 4,300 independent ones
    assert abs(on.mean() - share) < 4 * np.sqrt(share * (1 - share) / 4300)
    assert abs(on[:, 0].mean() - share) < 4 * np.sqrt(share * (1 - share) / sites)  # stationary from the start
    turned_off = (on[:, :-1] & ~on[:, 1:]).sum() / on[:, :-1].sum()
    turned_on = (~on[:, :-1] & on[:, 1:]).sum() / (~on[:, :-1]).sum()
    assert turned_off == pytest.approx(p_off, rel=0.1)
    assert turned_on == pytest.approx(p_on, rel=0.1)
    mean_length = on.sum() / ((on[:, 1:] & ~on[:, :-1]).sum() + on[:, 0].sum())
    assert mean_length == pytest.approx(1 / p_off, rel=0.1)


def test_bursts_are_per_site_or_shared() -> None:
    def patterns(p: FaultProfile) -> set[tuple[bool, ...]]:
        return {tuple(p.burst_on(0, t, site) for t in range(1, 200)) for site in range(8)}

    assert len(patterns(burst(0.2, 0.2))) == 8
    assert len(patterns(burst(0.2, 0.2, scope="step"))) == 1


def test_rows_follow_the_burst() -> None:
    p = burst(0.3, 0.3)
    for step in range(1, 50):
        assert bool(acts(p, step, OUT)) == p.burst_on(0, step, OUT.number)


# -- kept buffers ----------------------------------------------------------------------------------


def test_state_flips_are_exact_and_reproducible() -> None:
    p = profile(flip(level="state", input="w", elements=5, ranks=1, bits="exponent", count=2, tensor="out"))
    names, shapes, dtypes = ["x", "w"], [(8, 16), (16, 4)], ["bfloat16", "float32"]
    flips = state_flips(p, 1, [OUT], names, shapes, 2, dtypes)
    assert flips == state_flips(p, 1, [OUT], names, shapes, 2, dtypes)
    assert {(f.input, f.rank) for f in flips} == {("w", 1)}
    assert len({f.element for f in flips}) == 5
    assert len(set(flips)) == len(flips) == 10
    assert all(0 <= f.element < 64 and f.bit in named_bits("exponent", "float32") for f in flips)
    assert flips != state_flips(p, 2, [OUT], names, shapes, 2, dtypes)
    assert state_flips(p, 1, [DX], names, shapes, 2, dtypes) == []
    assert state_flips(p, 1, [OUT], ["x", "v"], shapes, 2, dtypes) == []
    assert rows(p, 1, [OUT], 2) is no_rows(2, 1)


def test_state_flips_default_to_the_first_input_and_to_bits_that_every_dtype_has() -> None:
    p = profile(flip(level="state", bits=[3, 30]))
    flips = state_flips(p, 1, [OUT], ["x", "w"], [(), (4,)], 2)
    assert flips == [StateFlip("x", rank, 0, 3) for rank in (0, 1)]
    assert state_flips(p, 1, [OUT], [], [], 2) == []


@pytest.mark.parametrize(
    ("dtype", "exponent", "mantissa"),
    [
        ("float32", range(23, 31), range(23)),
        ("bfloat16", range(7, 15), range(7)),
        ("float16", range(10, 15), range(10)),
        ("int32", range(0), range(31)),
    ],
)
def test_named_bits(dtype: str, exponent: range, mantissa: range) -> None:
    assert named_bits("exponent", dtype) == tuple(exponent)
    assert named_bits("mantissa", dtype) == tuple(mantissa)
    parts = [*mantissa, *exponent, *named_bits("sign", dtype)]
    assert tuple(parts) == named_bits("uniform", dtype)


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
    assert fault_profile.shipped_names() == [path.stem for path in shipped()]
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
