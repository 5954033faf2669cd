"""The shipped presets are data that fit together."""

from __future__ import annotations

import pytest

from tandem.errors import SpecError
from tandem.spec import RunSpec, check_tp, load_preset, preset_names, resolve

TP = {
    "tiny": (1, 2, 4),
    "small": (1, 2, 4),
    "smollm2-135m": (1, 3),
    "paper-16l": (1, 2, 4, 8),
    "llama3-8b": (1, 2, 4, 8),
    "mistral-7b-v0.3": (1, 2, 4, 8),
}
# Published sizes: Llama 3 8B and Mistral 7B v0.3 model cards, SmolLM2's 134.5 M.
PARAMETERS = {"smollm2-135m": 134_515_008, "llama3-8b": 8_030_261_248, "mistral-7b-v0.3": 7_248_023_552}


def parameters(name: str) -> int:
    m = load_preset(name).model
    attention = m.hidden * m.head_dim * 2 * (m.heads + m.kv_heads)
    layer = attention + 3 * m.hidden * m.ffn + 2 * m.hidden
    return m.layers * layer + m.hidden + m.vocab * m.hidden * (1 if m.tied else 2)


def test_every_preset_is_listed_smallest_first() -> None:
    names = preset_names()
    assert set(names) == set(TP)
    assert names[0] == "tiny"


@pytest.mark.parametrize("name", TP)
def test_preset_is_named_after_its_file_and_takes_bytes(name: str) -> None:
    preset = load_preset(name)
    assert preset.model.name == name
    assert preset.description
    assert preset.model.vocab >= 256


@pytest.mark.parametrize("name", TP)
def test_tensor_parallel_degrees(name: str) -> None:
    preset = load_preset(name)
    for tp in range(1, 9):
        if tp in TP[name]:
            check_tp(preset.model, preset.training, tp)
        else:
            with pytest.raises(SpecError, match=f"tp {tp} does not divide .* of {name}: use --tp 1 or "):
                check_tp(preset.model, preset.training, tp)


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_is_the_published_one(name: str) -> None:
    assert parameters(name) == PARAMETERS[name]


def test_the_papers_model_is_half_of_llama() -> None:
    paper, llama = load_preset("paper-16l").model, load_preset("llama3-8b").model
    assert paper.model_copy(update={"layers": 32, "name": llama.name}) == llama


@pytest.mark.parametrize("name", ["nonesuch", "", "../presets/tiny", "tiny.toml"])
def test_unknown_preset_is_one_line_with_the_choices(name: str) -> None:
    with pytest.raises(SpecError, match=r"unknown preset .*tiny") as error:
        load_preset(name)
    assert "\n" not in str(error.value)


def test_overrides_replace_the_presets_training() -> None:
    spec = RunSpec(model="small", batch=8, sequence=128, compute="float32", optimizer={"learning_rate": 0.5})
    model, training = resolve(spec)
    assert (model.name, training.batch, training.sequence, training.compute) == ("small", 8, 128, "float32")
    assert training.optimizer.learning_rate == 0.5
    assert training.optimizer.warmup_steps == load_preset("small").training.optimizer.warmup_steps
