"""Fault profiles: what is accepted, and what is refused before a run, in one line that names file, fault and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_samples import SITES, flip, profile
from tandem.errors import SpecError
from tandem.faults import injection as faults
from tandem.faults.injection import check_profile, load_profile, named_bits, rows
from tandem.spec import load_preset
from tandem_worker.model.plan import make_plan


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
