"""The real SmolLM2-135M on real text: logits against the oracles, tensor parallel 3, and that it still knows things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_oracles import ORACLES, Forward, largest_difference
from real_inputs import english_text, require, smollm2_dir
from tandem.errors import SpecError
from tandem.spec import Training, check_tp, load_preset
from tandem_worker.data import open_data
from tandem_worker.model.weights import read_config

BOUND = 1e-5
BATCH, SEQUENCE = 2, 96

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def smollm2(inputs: Path) -> Path:
    return smollm2_dir(inputs)


@pytest.fixture(scope="module")
def batch(smollm2: Path, inputs: Path) -> tuple[np.ndarray, np.ndarray]:
    """Real text, by the model's own tokenizer."""
    stream = open_data(
        [english_text(inputs)],
        smollm2 / "tokenizer.json",
        seed=0,
        batch=BATCH,
        sequence=SEQUENCE,
        vocab=read_config(smollm2).vocab,
    )
    return stream.batch(1)


@pytest.fixture(scope="module")
def forward(smollm2: Path) -> Forward:
    return Forward(smollm2, 3, BATCH, SEQUENCE)


@pytest.fixture(scope="module")
def logits(forward: Forward, batch: Any) -> np.ndarray:
    return forward(*batch).logits


def test_config_is_the_presets(smollm2: Path) -> None:
    ours, preset = read_config(smollm2), load_preset("smollm2-135m").model
    different = {"name", "init_std"}
    assert ours.model_dump(exclude=different) == preset.model_dump(exclude=different)


@pytest.mark.oracle
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
@pytest.mark.parametrize("oracle", ORACLES)
def test_logits_equal_the_oracles(oracle: str, smollm2: Path, batch: Any, logits: np.ndarray) -> None:
    require(*(("transformers", "torch") if oracle == "transformers" else ("mlx_lm",)), lock="oracle")
    assert largest_difference(logits, ORACLES[oracle](smollm2, batch[0])) <= BOUND


def test_tensor_parallel_1_and_3_agree(smollm2: Path, batch: Any, logits: np.ndarray) -> None:
    one = Forward(smollm2, 1, BATCH, SEQUENCE)(*batch).logits
    assert largest_difference(logits, one) <= BOUND


def test_tensor_parallel_2_is_refused(smollm2: Path) -> None:
    with pytest.raises(SpecError, match=r"tp 2 does not divide the KV heads \(3\) .* use --tp 1 or 3"):
        check_tp(read_config(smollm2), Training(sequence=SEQUENCE), 2)


def test_it_prefers_english_to_the_same_words_shuffled(forward: Forward, batch: Any) -> None:
    tokens, targets = batch
    window = np.concatenate([tokens, targets[:, -1:]], axis=1)
    shuffled = np.random.default_rng(0).permuted(window, axis=1)
    real, noise = forward(tokens, targets).loss, forward(shuffled[:, :-1], shuffled[:, 1:]).loss
    assert real < 5
    assert noise > real + 1


def test_it_knows_the_capital_of_france(smollm2: Path, forward: Forward) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = tokenizer.encode("The capital of France is").ids
    tokens = np.zeros((BATCH, SEQUENCE), np.int32)
    tokens[:, : len(prompt)] = prompt
    logits = forward(tokens, np.zeros_like(tokens)).logits
    assert tokenizer.decode([int(logits[0, len(prompt) - 1].argmax())]) == " Paris"
