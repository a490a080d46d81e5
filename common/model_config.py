"""What a model directory says about itself: shapes, position encoding, end tokens and a fingerprint. No torch.

Reads config.json, generation_config.json, tokenizer_config.json and the headers of the safetensors files. A key that
an architecture needs and the files lack is a CheckpointError that names key and file, never a silent default.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import CheckpointError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own cap
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
_NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """theta: base of the frequencies. type: "default", "linear", "llama3", ...; `parameters` are that type's own."""

    theta: float
    type: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """Everything the runner and the engine need to know of a model, in Hugging Face's meaning of each field.

    eos_token_ids: union of what config, generation config and tokenizer config call an end token.
    fingerprint: equal for equal models; another revision, precision or rope setting has another one.
    stored_dtype: what the config says that the weights are; empty where it says nothing.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]
    fingerprint: str
    stored_dtype: str = ""


def load_model_config(directory: Path) -> ModelConfig:
    """Read and check `directory`; raises CheckpointError naming what is missing, wrong or cut short, and where."""
    config = _ConfigFile(directory / CONFIG_FILE)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)  # absent: every query head has its own
    if num_heads % num_kv_heads:
        raise config.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    values: dict[str, Any] = {
        "architecture": config.architecture,
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": _head_dim(config, num_heads),
        "vocab_size": config.integer("vocab_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "rms_norm_eps": config.number("rms_norm_eps"),
        "rope": _rope_config(config),
        # Absent booleans mean False for this family; the loader refuses files that disagree.
        "tie_word_embeddings": config.boolean("tie_word_embeddings"),
        "hidden_act": config.text("hidden_act"),
        "attention_bias": config.boolean("attention_bias"),
        "mlp_bias": config.boolean("mlp_bias"),
        "eos_token_ids": _eos_token_ids(directory, config),
    }
    fingerprint = _fingerprint(values, weight_files(directory))
    return ModelConfig(**values, fingerprint=fingerprint, stored_dtype=_stored_dtype(config))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index, or the one file; sorted by name."""
    index = directory / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        paths = [directory / str(name) for name in sorted(set(weight_map.values()))]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    for path in paths:
        if path.parent != directory:  # an index must not reach outside the model
            raise CheckpointError(f"{index} names {path}, which is not in {directory}")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, {index} names it")
    if not paths:
        raise CheckpointError(f"{directory} holds no safetensors file")
    return paths


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises CheckpointError when it is missing or no JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, must hold a JSON object")
    return value


class _ConfigFile:
    """config.json with checked access: every error names the key and the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    @cached_property
    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.error(f"architectures is {names!r}, must list exactly one name")
        return names[0]

    def _required(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise self.error(f"{key} is missing, {self.architecture} needs it")
        return value

    def integer(self, key: str, *, default: int | None = None) -> int:
        value = default if default is not None and self.values.get(key) is None else self._required(key)
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.error(f"{key} is {value!r}, must be an integer of at least 1")
        return value

    def number(self, key: str) -> float:
        return self.check_number(key, self._required(key))

    def check_number(self, key: str, value: object) -> float:
        if type(value) not in (int, float) or not 0 < value < 1e30:  # type: ignore[operator]
            raise self.error(f"{key} is {value!r}, must be a number above 0")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, key: str) -> bool:
        value = self.values.get(key) or False
        if type(value) is not bool:
            raise self.error(f"{key} is {value!r}, must be true or false")
        return value

    def text(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}, must be a string")
        return value


def _head_dim(config: _ConfigFile, num_heads: int) -> int:
    hidden_size = config.integer("hidden_size")
    if config.values.get("head_dim") is None and hidden_size % num_heads:
        raise config.error(f"head_dim is missing and hidden_size {hidden_size} is no multiple of {num_heads} heads")
    head_dim = config.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise config.error(f"head_dim is {head_dim}, must be even")
    return head_dim


def _stored_dtype(config: _ConfigFile) -> str:
    """`dtype`, in older files `torch_dtype`."""
    return str(config.values.get("dtype") or config.values.get("torch_dtype") or "").removeprefix("torch.")


# --- position encoding ----------------------------------------------------------------------------------------------


def _rope_config(config: _ConfigFile) -> RopeConfig:
    """Settings stand in `rope_parameters` (newer files, theta included) or in `rope_scaling` beside `rope_theta`."""
    parameters = dict(config.values.get("rope_scaling") or config.values.get("rope_parameters") or {})
    rope_type = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    if any(isinstance(value, dict) for value in parameters.values()) or not isinstance(rope_type, str):
        raise config.error("rope_parameters differ by layer, which is not supported")
    theta = parameters.pop("rope_theta", None) or config.values.get("rope_theta")
    if theta is None:
        raise config.error(f"rope_theta is missing (top level and rope_parameters), {config.architecture} needs it")
    _check_partial_rotary(config, parameters)
    if rope_type in _NEEDS_ORIGINAL_LENGTH:
        parameters["original_max_position_embeddings"] = _original_length(config, parameters, rope_type)
    return RopeConfig(config.check_number("rope_theta", theta), rope_type, parameters)


def _check_partial_rotary(config: _ConfigFile, parameters: dict[str, Any]) -> None:
    factor = parameters.pop("partial_rotary_factor", None) or config.values.get("partial_rotary_factor") or 1.0
    if factor != 1.0:
        raise config.error(f"partial_rotary_factor is {factor!r}, only 1.0 is supported")


def _original_length(config: _ConfigFile, parameters: dict[str, Any], rope_type: str) -> float:
    key = "original_max_position_embeddings"
    value = config.values.get(key) or parameters.get(key)
    if value is None:
        raise config.error(f"{key} is missing, rope type {rope_type!r} needs it")
    return config.check_number(key, value)


# --- end tokens -----------------------------------------------------------------------------------------------------


def _eos_token_ids(directory: Path, config: _ConfigFile) -> frozenset[int]:
    ids = set(_as_ids(config.path, config.values.get("eos_token_id")))
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids |= set(_as_ids(generation, read_json(generation).get("eos_token_id")))
    return frozenset(ids | set(_tokenizer_eos_ids(directory)))


def _as_ids(path: Path, value: object) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise CheckpointError(f"{path}: eos_token_id is {value!r}, must be a token id or a list of them")
    return ids


def _tokenizer_eos_ids(directory: Path) -> Iterator[int]:
    """The id of the tokenizer's end token. A tokenizer configuration without one, or with an unknown one, adds none."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return
    values = read_json(path)
    yield from _as_ids(path, values.get("eos_token_id"))
    eos = values.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    if isinstance(content, str):
        found = _id_in_decoder(values.get("added_tokens_decoder"), content)
        found = _id_in_tokenizer(directory / "tokenizer.json", content) if found is None else found
        if found is not None:
            yield found


def _id_in_decoder(decoder: object, content: str) -> int | None:
    for token_id, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and token.get("content") == content:
            return int(token_id)
    return None


def _id_in_tokenizer(path: Path, content: str) -> int | None:
    if not path.is_file():
        return None
    tokenizer = read_json(path)
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == content:
            return int(token["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(content) if isinstance(vocab, dict) else None


# --- fingerprint ----------------------------------------------------------------------------------------------------


def _fingerprint(values: dict[str, Any], paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(values.items()):
        if key == "eos_token_ids":  # says when to stop, changes no KV
            continue
        _add(digest, key.encode())
        _add(digest, _canonical(value).encode())
    for path in paths:
        _add(digest, path.name.encode())
        for piece in _samples(path):
            _add(digest, piece)
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, piece: bytes) -> None:
    digest.update(len(piece).to_bytes(8, "little") + piece)


def _canonical(value: object) -> str:
    if isinstance(value, RopeConfig):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, frozenset):
        value = sorted(value)
    return json.dumps(value, sort_keys=True)


def _samples(path: Path) -> Iterator[bytes]:
    """Size, header, and a few windows spread over the data: cheap, and another revision differs in all of them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = read_header(path)
        start = 8 + len(header)
        yield size.to_bytes(8, "little")
        yield header
        for i in range(_NUM_SAMPLES):
            file.seek(start + max(0, size - start - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def read_header(path: Path) -> bytes:
    """The JSON header of a safetensors file; raises CheckpointError when the file is corrupt or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is corrupt: header of {length} bytes in a file of {size}")
        header = file.read(length)
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        data_bytes = max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is corrupt: its header is not valid") from None
    if size != 8 + length + data_bytes:
        raise CheckpointError(
            f"{path} is cut short or corrupt: {size} bytes, its header says {8 + length + data_bytes}"
        )
    return header
