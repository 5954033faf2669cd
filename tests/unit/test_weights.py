"""Hugging Face weights reach every rank unchanged, and what does not fit is refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tandem.errors import WeightsError
from tandem.spec import ModelConfig
from tandem_worker.model.layout import groups, leaves
from tandem_worker.model.weights import check_weights, load_parameters, read_config, weights_digest

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "vocab_size": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def tensors(config: dict[str, Any] = CONFIG, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names and shapes, written out by hand as the independent statement of them."""
    rng = np.random.default_rng(0)
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = h
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}"
        shapes |= {
            f"{p}.input_layernorm.weight": (h,),
            f"{p}.self_attn.q_proj.weight": (q, h),
            f"{p}.self_attn.k_proj.weight": (kv, h),
            f"{p}.self_attn.v_proj.weight": (kv, h),
            f"{p}.self_attn.o_proj.weight": (h, q),
            f"{p}.post_attention_layernorm.weight": (h,),
            f"{p}.mlp.gate_proj.weight": (f, h),
            f"{p}.mlp.up_proj.weight": (f, h),
            f"{p}.mlp.down_proj.weight": (h, f),
        }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(
    directory: Path,
    config: dict[str, Any] = CONFIG,
    weights: dict[str, np.ndarray] | None = None,
    shards: int = 1,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weights = tensors(config) if weights is None else weights
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    names, table = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({name: weights[name] for name in part}, directory / file)
        table |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return directory


def loaded(directory: Path, tp: int) -> dict[str, list[np.ndarray]]:
    slots: dict[str, list[np.ndarray]] = {}
    for slot, rank, value in load_parameters(directory, read_config(directory), tp):
        assert rank == len(slots.setdefault(slot, []))
        slots[slot].append(value)
    return slots


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(WeightsError) as error:
        load_parameters(directory, read_config(directory), 1)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_ranks_put_together_are_the_file(tmp_path: Path, tp: int, dtype: str, shards: int) -> None:
    weights = tensors(dtype=DTYPES[dtype])
    slots = loaded(write(tmp_path, weights=weights, shards=shards), tp)
    for layer in range(2):
        p = f"model.layers.{layer}"
        for ours, theirs, axis in [
            (f"attn.{layer}.wq", f"{p}.self_attn.q_proj", 1),
            (f"attn.{layer}.wk", f"{p}.self_attn.k_proj", 1),
            (f"attn.{layer}.wv", f"{p}.self_attn.v_proj", 1),
            (f"attn.{layer}.wo", f"{p}.self_attn.o_proj", 0),
            (f"ffn.{layer}.w_gate", f"{p}.mlp.gate_proj", 1),
            (f"ffn.{layer}.w_up", f"{p}.mlp.up_proj", 1),
            (f"ffn.{layer}.w_down", f"{p}.mlp.down_proj", 0),
        ]:
            whole = np.concatenate(slots[f"master.{ours}"], axis)
            np.testing.assert_array_equal(whole.T, weights[f"{theirs}.weight"].astype(np.float32))
        for ours, theirs in [("attn", "input_layernorm"), ("ffn", "post_attention_layernorm")]:
            for part in slots[f"master.{ours}.{layer}.norm"]:
                np.testing.assert_array_equal(part, weights[f"{p}.{theirs}.weight"].astype(np.float32))
    for ours, theirs in [("embed.embedding", "model.embed_tokens"), ("head.unembedding", "lm_head")]:
        whole = np.concatenate(slots[f"master.{ours}"], 0)
        np.testing.assert_array_equal(whole, weights[f"{theirs}.weight"].astype(np.float32))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_slot_of_the_layout_is_filled_once(tmp_path: Path, tp: int, tied: bool) -> None:
    directory = write(tmp_path, CONFIG | {"tie_word_embeddings": tied})
    model = read_config(directory)
    wanted = {
        f"master.{group}.{leaf.name}": leaf.shape
        for group, module, _ in groups(model)
        for leaf in leaves(module, model, tp)
    }
    slots = loaded(directory, tp)
    assert {slot: parts[0].shape for slot, parts in slots.items()} == wanted
    for parts in slots.values():
        assert len(parts) == tp
        assert all(part.dtype == np.float32 and part.flags.c_contiguous for part in parts)


def test_a_tied_head_that_is_stored_again_is_ignored(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    weights = tensors(config)
    directory = write(tmp_path, config, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()})
    assert "master.head.unembedding" not in loaded(directory, 2)


def test_config_of_llama_31_in_both_styles(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = read_config(write(tmp_path / "a", CONFIG | {"rope_theta": 5e5, "rope_scaling": scaling}))
    new = read_config(write(tmp_path / "b", CONFIG | {"rope_parameters": scaling | {"rope_theta": 5e5}}))
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == {key: value for key, value in scaling.items() if key != "rope_type"}


def test_config_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    sparse = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    llama = read_config(write(tmp_path / "a", sparse | {"num_key_value_heads": None}, {}))
    assert (llama.kv_heads, llama.norm_eps, llama.rope_theta, llama.head_dim) == (8, 1e-6, 1e4, 2)
    assert llama.sliding_window is None
    mistral = read_config(write(tmp_path / "b", sparse | {"architectures": ["MistralForCausalLM"]}, {}))
    assert (mistral.kv_heads, mistral.sliding_window) == (8, 4096)
    v03 = sparse | {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 4}
    assert read_config(write(tmp_path / "c", v03, {})).sliding_window is None
    assert read_config(tmp_path / "c").head_dim == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", "LlamaForCausalLM")),
        ({"architectures": []}, ("architecture None",)),
        ({"architectures": [["x"]]}, ("architecture",)),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "silu")),
        ({"quantization_config": {"bits": 4}}, ("quantised",)),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, ("yarn", "llama3")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, ("low_freq_factor",)),
        ({"rope_scaling": 3}, ("rotary",)),
        ({"partial_rotary_factor": 0.5}, ("partial",)),
        ({"hidden_size": "many"}, ("hidden",)),
        ({"hidden_size": None}, ("hidden",)),
        ({"num_hidden_layers": 10**30}, ("layers", "absurd")),
        ({"num_attention_heads": 0}, ("heads",)),
        ({"num_key_value_heads": 3}, ("kv_heads",)),
    ],
)
def test_unsupported_config_is_named(tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(write(tmp_path, CONFIG | change, tensors()), *words)


def test_missing_files_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is no directory")
    refused(tmp_path, "config.json is missing")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "model.safetensors is missing", "model.safetensors.index.json")
    write(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors is missing")


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    weights = tensors()
    short = {name: value for name, value in weights.items() if "layers.1" not in name}
    refused(write(tmp_path / "a", weights=short), "model.layers.1.", "and 8 more are missing")
    refused(
        write(tmp_path / "b", weights=weights | {"model.layers.0.self_attn.q_proj.bias": np.zeros(16)}), "q_proj.bias"
    )
    check_weights(
        write(tmp_path / "c", weights=weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)}),
        read_config(tmp_path / "c"),
    )


def test_shapes_and_dtypes_that_do_not_fit(tmp_path: Path) -> None:
    weights = tensors()
    refused(write(tmp_path / "a", CONFIG | {"vocab_size": 64}, weights), "[32, 16]", "[64, 16]")
    wrong = weights | {"model.norm.weight": np.zeros(16, np.float64)}
    refused(write(tmp_path / "b", weights=wrong), "model.norm.weight", "F64")
    wrong = weights | {"model.norm.weight": np.zeros(16, np.int8)}
    refused(write(tmp_path / "c", weights=wrong), "I8")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, length: float) -> None:
    directory = write(tmp_path)
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(length * len(whole))])
    refused(directory, "model.safetensors", "fetch")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=400), size=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_hostile_headers_are_refused(tmp_path: Path, junk: bytes, size: int | None) -> None:
    directory = write(tmp_path)
    header = b"" if size is None else struct.pack("<Q", size)
    (directory / "model.safetensors").write_bytes(header + junk)
    refused(directory)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"a": "../outside.safetensors"}, "outside"),
        ({"a": "/etc/passwd"}, "passwd"),
        ({"a": "model.pkl"}, "model.pkl"),
        ({"a": 3}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_index_cannot_point_elsewhere(tmp_path: Path, entry: object, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entry}))
    refused(tmp_path, words)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_broken_json_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    refused(tmp_path, "config.json")


def test_an_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    directory = write(tmp_path, shards=2)
    index = directory / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["model.norm.weight"] = next(
        file for file in table["weight_map"].values() if file != table["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(table))
    refused(directory, "model.norm.weight is missing")


def test_digest_follows_contents_and_not_the_place(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a", shards=2), write(tmp_path / "b", shards=2)
    assert weights_digest(one) == weights_digest(two)
    assert read_config(one) == read_config(two)
    file = two / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_digest(one) != weights_digest(two)
    (two / "unrelated.txt").write_text("x")
    three = write(tmp_path / "c", CONFIG | {"rms_norm_eps": 1e-6}, shards=2)
    assert weights_digest(one) != weights_digest(three)


def test_loading_holds_one_part_at_a_time(tmp_path: Path) -> None:
    import tracemalloc

    config = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 256}
    directory = write(tmp_path, config)
    model: ModelConfig = read_config(directory)
    total = sum(value.nbytes for _, _, value in load_parameters(directory, model, 2))
    largest = max(value.nbytes for _, _, value in load_parameters(directory, model, 2))
    tracemalloc.start()
    for _ in load_parameters(directory, model, 2):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 20 * largest
    assert peak < 5 * largest
