"""Tokenizer of a GGUF file as Hugging Face files: tokenizer.json and tokenizer_config.json.

Handles byte-level BPE ("gpt2" in GGUF). GGUF names the pre-tokenizer only by a word; the table below says what the
words stand for (llama.cpp, src/llama-vocab.cpp). A word that is not in it is refused: a guess would split text wrongly.
"""

from __future__ import annotations

from typing import Any

from common.checkpoints.gguf_file import GGUFFile
from common.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # token types, llama.cpp's enum

_BYTE_LEVEL_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTE_LEVEL_ONLY = {**_BYTE_LEVEL_GPT2, "use_regex": False}
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _BYTE_LEVEL_ONLY]


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": [_BYTE_LEVEL_GPT2],
    "gpt-2": [_BYTE_LEVEL_GPT2],
    "smollm": [_SINGLE_DIGITS, _BYTE_LEVEL_GPT2],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
_IGNORES_MERGES = {"llama-bpe"}  # a word that is a token as a whole is taken before any merge
_ADDS_BOS = {"llama-bpe"}  # when the file does not say


def tokenizer_json(gguf: GGUFFile) -> dict[str, Any]:
    """The `tokenizers` library's serialised form."""
    if (kind := gguf.require("tokenizer.ggml.model")) != "gpt2":
        raise CheckpointError(f"{gguf.path}: tokenizer {kind!r} is not supported, only 'gpt2' (byte-level BPE) is")
    pre = gguf.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{gguf.path}: pre-tokenizer {pre!r} is not supported, only {sorted(_PRE_TOKENIZERS)} are"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, **token} for token_id, token in _added_tokens(gguf).items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _post_processor(gguf, pre),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe_model(gguf, pre),
    }


def tokenizer_config(gguf: GGUFFile, max_model_len: int) -> dict[str, Any]:
    names = ("bos", "eos", "unk", "pad")
    special = {f"{name}_token": token for name in names if (token := _special_token(gguf, name)) is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        **special,
        "added_tokens_decoder": {str(token_id): token for token_id, token in _added_tokens(gguf).items()},
    }
    if template := gguf.get("tokenizer.chat_template", None):
        config["chat_template"] = template
    return config


def special_token_id(gguf: GGUFFile, name: str) -> int | None:
    """Id of the bos, eos, unk, pad or eot token, if the file names one."""
    key = {"unk": "unknown", "pad": "padding"}.get(name, name)
    token_id: int | None = gguf.get(f"tokenizer.ggml.{key}_token_id", None)
    return token_id


def _special_token(gguf: GGUFFile, name: str) -> str | None:
    token_id = special_token_id(gguf, name)
    return None if token_id is None else _tokens(gguf)[token_id]


def _tokens(gguf: GGUFFile) -> list[str]:
    tokens: list[str] = gguf.require("tokenizer.ggml.tokens")
    return tokens


def _added_tokens(gguf: GGUFFile) -> dict[int, dict[str, Any]]:
    """Tokens that are matched as a whole in the text, before BPE. Control tokens are left out of decoded text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    types = gguf.require("tokenizer.ggml.token_type")
    return {
        token_id: {"content": token, **flags, "special": kind == _CONTROL}
        for token_id, (token, kind) in enumerate(zip(_tokens(gguf), types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    }


def _bpe_model(gguf: GGUFFile, pre: str) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre in _IGNORES_MERGES,
        "vocab": {token: token_id for token_id, token in enumerate(_tokens(gguf))},
        "merges": [merge.split(" ", 1) for merge in gguf.require("tokenizer.ggml.merges")],
    }


def _post_processor(gguf: GGUFFile, pre: str) -> dict[str, Any] | None:
    """Prepends the bos token where the model was trained with one."""
    bos_id, bos = special_token_id(gguf, "bos"), _special_token(gguf, "bos")
    if bos is None or not gguf.get("tokenizer.ggml.add_bos_token", pre in _ADDS_BOS):
        return None
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, start, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
