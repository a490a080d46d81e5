"""Encoding, pieces, and what is refused of a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from common.errors import CheckpointError
from common.text.tokenizer import TextTokenizer


def test_round_trip(byte_level: TextTokenizer) -> None:
    text = "the naïve fox 🙂\n\nEND!"
    assert byte_level.decode(byte_level.encode(text)) == text


def test_pieces_are_the_bytes_of_the_text(byte_level: TextTokenizer) -> None:
    text = "größer 日本語 🙂"
    assert b"".join(byte_level.piece(i).data for i in byte_level.encode(text)) == text.encode()


def test_special_tokens_are_known(byte_level: TextTokenizer) -> None:
    [end] = byte_level.encode("<|im_end|>")
    assert byte_level.piece(end).is_special
    assert byte_level.token_text(end) == "<|im_end|>"


def test_no_text_has_fewer_tokens_than_its_bytes_allow(byte_level: TextTokenizer) -> None:
    text = "the quick brown fox " * 20
    assert len(byte_level.encode(text)) >= len(text) / byte_level.max_token_bytes


def test_a_files_own_truncation_is_off() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.enable_truncation(1)
    assert tokenizer.truncation is not None
    TextTokenizer(tokenizer)
    assert tokenizer.truncation is None


def test_reads_a_directory(byte_level: TextTokenizer, tmp_path: Path) -> None:
    byte_level._tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = TextTokenizer.from_directory(tmp_path)
    assert loaded.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert loaded.encode("the fox") == byte_level.encode("the fox")


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        TextTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no valid tokenizer"):
        TextTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([decoders.WordPiece()], "WordPiece"),
        ([decoders.Strip(" ", 1, 0), decoders.Fuse()], "order Strip, Fuse"),
        ([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)], "order Replace, Strip"),
        ([decoders.Fuse(), decoders.Metaspace()], "order Fuse, Metaspace"),
        ([decoders.Fuse(), decoders.Strip(" ", 1, 1)], "Strip"),
        ([decoders.Replace("x", " ")], "Replace"),
        ([decoders.Metaspace("_")], "Metaspace"),
    ],
)
def test_an_unsupported_decoder_is_named(steps: list[decoders.Decoder], words: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(steps)
    with pytest.raises(CheckpointError, match=words):
        TextTokenizer(tokenizer)


def test_tokens_that_only_look_like_bytes() -> None:
    tokenizer = Tokenizer(models.BPE({"<0x-1>": 0, "<0x 1>": 1, "<0x41>": 2}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    text = TextTokenizer(tokenizer)
    assert [text.piece(i).is_byte for i in range(3)] == [False, False, True]
    assert text.decode([0, 1, 2]) == "<0x-1><0x 1>A"
