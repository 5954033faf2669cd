"""Hugging Face weights: ``config.json`` and safetensors, read rank by rank. The files are untrusted input.

Only ``safetensors`` and JSON are read, never a pickle. ``safetensors`` itself bounds a file's header (100 MB) and
refuses offsets that overlap, leave gaps or pass the end of the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from tandem.errors import WeightsError
from tandem.spec import ModelConfig
from tandem.vocabulary import Module
from tandem_worker.model.layout import Leaf, groups, leaves

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")
JSON_LIMIT = 64 << 20
"""Largest JSON file that is parsed, in bytes; the index of a model with 100,000 tensors has 10 MB."""
SIZE_LIMIT = 1 << 24
"""Largest number of layers, heads, or entries of an axis that a configuration may ask for."""

_HF_LAYER = {
    (Module.ATTN, "norm"): "input_layernorm",
    (Module.ATTN, "wq"): "self_attn.q_proj",
    (Module.ATTN, "wk"): "self_attn.k_proj",
    (Module.ATTN, "wv"): "self_attn.v_proj",
    (Module.ATTN, "wo"): "self_attn.o_proj",
    (Module.FFN, "norm"): "post_attention_layernorm",
    (Module.FFN, "w_gate"): "mlp.gate_proj",
    (Module.FFN, "w_up"): "mlp.up_proj",
    (Module.FFN, "w_down"): "mlp.down_proj",
}
_HF_OUTER = {
    (Module.EMBED, "embedding"): "model.embed_tokens.weight",
    (Module.HEAD, "norm"): "model.norm.weight",
    (Module.HEAD, "unembedding"): "lm_head.weight",
}
_SKIPPED = re.compile(r"\.rotary_emb\.inv_freq$")
"""A buffer that old exporters stored; it follows from ``rope_theta``."""

# What the two configuration classes of transformers take for a key that config.json leaves out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": None, "sliding_window": None},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(directory: Path) -> ModelConfig:
    """The model that a Hugging Face directory describes.

    Its name is made of the architecture and the size, so that it does not depend on where the files lie.

    Args:
        directory: holds ``config.json``; rotary settings may be in the style of transformers 4
            (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).

    Raises:
        WeightsError: missing or unreadable file, an architecture or feature that Tandem's model lacks, or absurd sizes.
    """
    path = _file(directory, CONFIG, "a Hugging Face model directory has one")
    config = _read_json(path)
    architecture = _architecture(config, path)

    def get(key: str, default: Any = None) -> Any:
        value = config.get(key)
        return _DEFAULTS[architecture].get(key, default) if value is None and key not in config else value

    for key, accepted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if (value := config.get(key)) is not None and value != accepted:
            raise WeightsError(f"{path}: {key} {value!r} is not supported: Tandem's model has {key} {accepted!r} only")
    if config.get("quantization_config"):
        raise WeightsError(f"{path}: quantised weights are not supported: give float32, bfloat16 or float16 weights")
    theta, scaling = _rope(config, path)
    heads, hidden, layers = get("num_attention_heads"), get("hidden_size"), get("num_hidden_layers")
    head_dim = get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    kv_heads = get("num_key_value_heads")
    values = {
        "name": f"{architecture.removesuffix('ForCausalLM').lower()}-{layers}l-{hidden}",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "ffn": get("intermediate_size"),
        "vocab": get("vocab_size"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": get("rms_norm_eps", 1e-6),
        "tied": get("tie_word_embeddings", False),
        "sliding_window": get("sliding_window"),
        "init_std": get("initializer_range", 0.02),
    }
    for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        if isinstance(size := values[key], int) and size > SIZE_LIMIT:
            raise WeightsError(f"{path}: {key} {size} is absurd: take {CONFIG} from the model's publisher")
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "model"
        raise WeightsError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def read_begin(directory: Path) -> int | None:
    """Token with which the configuration says that a text begins (``bos_token_id``); None where it does not say.

    Raises:
        WeightsError: as `read_config`.
    """
    found = _read_json(_file(directory, CONFIG, "a Hugging Face model directory has one")).get("bos_token_id")
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def load_parameters(directory: Path, model: ModelConfig, tp: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """The ``master.*`` slots of every rank, one at a time, in the order of ``layout.groups``.

    All checks run before this returns. At most one rank's slice of one tensor is held in memory at a time.

    Args:
        directory: Hugging Face directory; one ``model.safetensors`` or shards named by its index.
        model: must have the shapes of the files, see ``read_config``.
        tp: ranks that share the weights.

    Returns:
        Iterator over (slot, rank, fp32 array of ``Leaf.shape``, C order).

    Raises:
        WeightsError: names, shapes or dtypes that do not fit ``model``, missing or corrupt files.
    """
    files = check_weights(directory, model)
    return _load(files, model, tp)


def check_weights(directory: Path, model: ModelConfig) -> dict[str, Path]:
    """Check every header against the model, without reading a weight.

    Returns:
        File of each tensor that the model needs, by its Hugging Face name.

    Raises:
        WeightsError: as ``load_parameters``.
    """
    files = _tensor_files(directory)
    expected = {tensor.hf: tensor.full_shape for tensor in _tensors(model, tp=1)}
    _check_names(directory, set(files), set(expected), tied=model.tied)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
        for name, shape in expected.items():
            part = handles[files[name]].get_slice(name)
            found, dtype = tuple(part.get_shape()), part.get_dtype()
            if found != shape:
                raise WeightsError(
                    f"{files[name]}: {name} has shape {list(found)}, but {CONFIG} asks for {list(shape)}: "
                    f"the weights belong to another {CONFIG}"
                )
            if dtype not in DTYPES:
                raise WeightsError(
                    f"{files[name]}: {name} has dtype {dtype}: convert the weights to one of {', '.join(DTYPES)}"
                )
    return {name: files[name] for name in expected}


def weights_digest(directory: Path) -> str:
    """SHA-256 (hex) of ``config.json`` and the weight files, by sorted name; part of parity.

    Raises:
        WeightsError: a file is missing or cannot be read.
    """
    paths = {path.name: path for path in _tensor_files(directory).values()}
    paths[CONFIG] = _file(directory, CONFIG, "a Hugging Face model directory has one")
    total = hashlib.sha256()
    for name in sorted(paths):
        try:
            with paths[name].open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise WeightsError(f"{paths[name]} cannot be read: {error.strerror}") from None
        total.update(f"{name}\0{digest}\n".encode())
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One weight, in the layout of Tandem (``leaf``) and by its Hugging Face name."""

    slot: str
    hf: str
    leaf: Leaf
    transposed: bool
    full_shape: tuple[int, ...]
    """Shape in the file: matrices of linear layers are [out, in] there."""


def _tensors(model: ModelConfig, tp: int) -> Iterator[_Tensor]:
    for group, module, layer in groups(model):
        for leaf in leaves(module, model, tp):
            if layer < 0:
                hf = _HF_OUTER[module, leaf.name]
            else:
                hf = f"model.layers.{layer}.{_HF_LAYER[module, leaf.name]}.weight"
            transposed = layer >= 0 and len(leaf.shape) == 2
            shape = tuple(n * tp if axis == leaf.split else n for axis, n in enumerate(leaf.shape))
            yield _Tensor(
                f"master.{group}.{leaf.name}", hf, leaf, transposed, tuple(reversed(shape)) if transposed else shape
            )


def _load(files: Mapping[str, Path], model: ModelConfig, tp: int) -> Iterator[tuple[str, int, np.ndarray]]:
    with ExitStack() as stack:
        handles = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
        for tensor in _tensors(model, tp):
            part = handles[files[tensor.hf]].get_slice(tensor.hf)
            for rank in range(tp):
                yield tensor.slot, rank, _rank_part(part, tensor, rank, files[tensor.hf])


def _rank_part(part: Any, tensor: _Tensor, rank: int, path: Path) -> np.ndarray:
    leaf = tensor.leaf
    cut = [slice(None)] * len(leaf.shape)
    if leaf.split is not None:
        width = leaf.shape[leaf.split]
        axis = len(leaf.shape) - 1 - leaf.split if tensor.transposed else leaf.split
        cut[axis] = slice(rank * width, (rank + 1) * width)
    try:
        value = part[tuple(cut)]
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: {tensor.hf} cannot be read ({error}): fetch the file again") from None
    return np.ascontiguousarray(value.T if tensor.transposed else value, dtype=np.float32)


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in _DEFAULTS:
        raise WeightsError(f"{path}: architecture {name!r} is not supported: use one of {', '.join(_DEFAULTS)}")
    return name


def _rope(config: Mapping[str, Any], path: Path) -> tuple[Any, dict[str, Any] | None]:
    """Base and scaling of the rotary embedding, from either style of ``config.json``."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise WeightsError(f"{path}: the rotary settings are no table: take {CONFIG} from the model's publisher")
    theta = settings.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise WeightsError(f"{path}: partial rotary embeddings are not supported: use a Llama or Mistral model")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise WeightsError(f"{path}: rotary scaling {kind!r} is not supported: use 'default' or 'llama3'")
    if missing := [key for key in _SCALING if key not in settings]:
        raise WeightsError(f"{path}: rotary scaling 'llama3' lacks {missing[0]}")
    return theta, {key: settings[key] for key in _SCALING}


def _tensor_files(directory: Path) -> dict[str, Path]:
    """File of every tensor in the directory, by the tensor's name."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is no directory: give one with {CONFIG} and {SINGLE}")
    single = directory / SINGLE
    if single.is_file() or not (directory / INDEX).is_file():
        _file(directory, SINGLE, f"or {INDEX} with the shards that it names")
        with _open(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    index = directory / INDEX
    table = _read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise WeightsError(f"{index}: there is no weight_map: fetch the file again")
    for name in sorted(set(table.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{index}: {name!r} is no name of a safetensors file beside it")
        _file(directory, name, f"{INDEX} names it")
    files = {tensor: directory / name for tensor, name in table.items()}
    for path in sorted(set(files.values())):
        with _open(path) as handle:
            held = set(handle.keys())
        if absent := sorted(tensor for tensor, at in files.items() if at == path and tensor not in held):
            raise WeightsError(f"{path}: {absent[0]} is missing, though {INDEX} places it there: fetch the file again")
    return files


def _check_names(directory: Path, found: set[str], expected: set[str], *, tied: bool) -> None:
    if missing := sorted(expected - found):
        raise WeightsError(f"{directory}: {_listed(missing)} missing: the weights do not belong to this {CONFIG}")
    # A tied head is sometimes stored a second time; transformers ignores it too.
    extra = found - expected - ({_HF_OUTER[Module.HEAD, "unembedding"]} if tied else set())
    if unexpected := sorted(name for name in extra if not _SKIPPED.search(name)):
        raise WeightsError(f"{directory}: {_listed(unexpected)} unexpected: the weights do not belong to this {CONFIG}")


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path} is no whole safetensors file ({reason}): fetch it again") from None


def _file(directory: Path, name: str, mend: str) -> Path:
    if not directory.is_dir():
        raise WeightsError(f"{directory} is no directory: give one with {CONFIG} and {SINGLE}")
    path = directory / name
    if not path.is_file():
        raise WeightsError(f"{path} is missing: {mend}")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise WeightsError(f"{path} is larger than {JSON_LIMIT >> 20} MiB: it is no JSON file of a model")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise WeightsError(f"{path} is no JSON: fetch it again") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds no JSON object: fetch it again")
    return value
