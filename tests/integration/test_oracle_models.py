"""Random small Llama and Mistral models: the chain's logits against independent implementations, and across TP."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from model_oracles import ORACLES, Forward, largest_difference
from real_inputs import require
from tandem_worker.model.weights import read_config

BOUND = 1e-5
BATCH, SEQUENCE = 2, 48
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1e6, "sliding_window": None}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "llama without grouping": {"num_key_value_heads": 8, "rope_theta": 5e5},
    "llama wide heads": {"head_dim": 16},
    "llama 3.1 scaling": {"rope_theta": 5e5, "rope_scaling": LLAMA31},
    "mistral": MISTRAL,
    "mistral wide heads": {**MISTRAL, "head_dim": 32},
}
# mlx-lm knows no window in Mistral, so this one is proved by transformers alone.
WINDOWED = {"mistral sliding window": {**MISTRAL, "sliding_window": 16}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        config = BASE | (MODELS | WINDOWED)[name]
        (path / "config.json").write_text(json.dumps(config))
        save_file(random_weights(config), path / "model.safetensors")
        return path

    return make


@pytest.fixture(scope="module")
def ours(directory: Any) -> Any:
    @cache
    def run(name: str, tp: int) -> Any:
        return Forward(directory(name), tp, BATCH, SEQUENCE)(*batch())

    return run


def batch() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(7).integers(0, BASE["vocab_size"], (BATCH, SEQUENCE + 1), dtype=np.int32)
    return ids[:, :-1], ids[:, 1:]


def random_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of unit gain, so that scores spread, and norms that matter; larger gains would only amplify rounding."""
    rng = np.random.default_rng(3)
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    d = config.get("head_dim", h // config["num_attention_heads"])
    q, kv = d * config["num_attention_heads"], d * config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, h).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(v, h), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(v, h)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        weights[f"{p}.input_layernorm.weight"] = norm()
        weights[f"{p}.post_attention_layernorm.weight"] = norm()
        for name, shape in {
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (f, h),
            "mlp.up_proj": (f, h),
            "mlp.down_proj": (h, f),
        }.items():
            weights[f"{p}.{name}.weight"] = matrix(*shape)
    return weights


@pytest.mark.oracle
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("oracle", ORACLES)
def test_logits_equal_the_oracles(oracle: str, name: str, directory: Any, ours: Any) -> None:
    require(*(("transformers", "torch") if oracle == "transformers" else ("mlx_lm",)), lock="oracle")
    theirs = ORACLES[oracle](directory(name), batch()[0])
    assert largest_difference(ours(name, 1).logits, theirs) <= BOUND


@pytest.mark.oracle
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_window_equals_transformers(name: str, directory: Any, ours: Any) -> None:
    require("transformers", "torch", lock="oracle")
    theirs = ORACLES["transformers"](directory(name), batch()[0])
    assert largest_difference(ours(name, 1).logits, theirs) <= BOUND


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama", "llama tied", "llama 3.1 scaling", "mistral"])
def test_config_that_transformers_writes_is_read_alike(name: str, directory: Any, tmp_path: Path) -> None:
    """Whatever the style: transformers 5 writes ``rope_parameters``."""
    require("transformers", lock="oracle")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        from transformers import AutoConfig

        AutoConfig.from_pretrained(directory(name)).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert read_config(tmp_path) == read_config(directory(name))


@pytest.mark.parametrize("name", ["llama tied", "mistral"])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_degrees_agree(name: str, tp: int, ours: Any) -> None:
    assert largest_difference(ours(name, tp).logits, ours(name, 1).logits) <= BOUND


@pytest.mark.parametrize("name", ["llama tied", "mistral"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_heads_statistics_are_those_of_the_logits(name: str, tp: int, ours: Any) -> None:
    """The head never holds the logits; its sums must be theirs all the same."""
    result = ours(name, tp)
    logits = result.logits.astype(np.float64)
    lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    target = np.take_along_axis(logits, batch()[1][..., None], -1)[..., 0]
    largest = np.abs(logits).max()
    assert np.abs(result.lse - lse).max() <= BOUND * largest
    assert np.abs(result.target - target).max() <= BOUND * largest
    assert result.loss == pytest.approx((lse - target).mean(), rel=1e-5)
