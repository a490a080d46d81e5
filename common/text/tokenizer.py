"""Text to token ids and back, straight on the `tokenizers` library: no transformers, no torch.

Reads a Hugging Face directory (tokenizer.json, tokenizer_config.json). Knows what bytes each token stands for, which is
what makes incremental decoding exact (`detokenizer.py`); it knows no chat template and no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import CheckpointError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
_FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_STEP_ORDER = {"Replace": 0, "Metaspace": 0, "ByteFallback": 0, "Fuse": 1, "Strip": 2}


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to a text: bytes of UTF-8, possibly a part of a character. Unknown ids have none.

    is_byte: a byte-fallback token such as <0xE2>, whose run is decoded as a whole.
    """

    data: bytes
    is_byte: bool = False
    is_special: bool = False


@dataclass(frozen=True)
class DecodeRules:
    """How a tokenizer's own decoder joins tokens, as far as incremental decoding needs it.

    is_byte_level: tokens spell bytes in GPT-2's alphabet; otherwise SentencePiece's, where SPACE_MARK is a space.
    num_leading_spaces: spaces that decoding strips from the start of a text.
    strips_first_token: of a text's first token decoding strips every SPACE_MARK.
    has_marks_in_bytes: a SPACE_MARK that byte tokens spell is a space too, not the character.
    """

    is_byte_level: bool
    has_byte_fallback: bool = False
    num_leading_spaces: int = 0
    strips_first_token: bool = False
    has_marks_in_bytes: bool = False


class TextTokenizer:
    """A tokenizer; safe to call from several threads.

    special_tokens: by name (bos_token, eos_token, ...), for chat templates.
    Raises CheckpointError when a file is missing, broken or needs a decoder that is not supported.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()  # limits are the caller's; a file's own truncation would cut prompts silently
        tokenizer.no_padding()
        self.special_tokens = special_tokens or {}
        self.rules = _decode_rules(tokenizer)
        self.num_tokens: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, Piece] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the tokenizer is read from it")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} is no valid tokenizer: {error}") from None
        return cls(tokenizer, read_special_tokens(directory))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Lets other threads run meanwhile (the batch call is the one that frees the GIL)."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The library's own decoding of a whole list; ids without a token are left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> Piece:
        """What this token adds to a text; remembered, since answers repeat tokens."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._make_piece(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """The token alone as text, special tokens included; parts of characters become U+FFFD."""
        return self.piece(token_id).data.decode("utf-8", "replace")

    @cached_property
    def max_token_bytes(self) -> int:
        """Most bytes of text that one token can stand for: n bytes have at least n / max_token_bytes tokens."""
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        is_exact = self.rules.is_byte_level and self._tokenizer.normalizer is None
        return longest * (1 if is_exact else 4)

    def _make_piece(self, token_id: int) -> Piece:
        token = self._tokenizer.id_to_token(token_id) if token_id < 2**32 else None
        if token is None:
            return Piece(b"")
        is_special = token_id in self._special_ids
        if self.rules.is_byte_level:
            return Piece(_byte_level_bytes(token), is_special=is_special)
        if self.rules.has_byte_fallback and (byte := _fallback_byte(token)) is not None:
            return Piece(bytes([byte]), is_byte=True, is_special=is_special)
        return Piece(token.replace(SPACE_MARK, " ").encode(), is_special=is_special)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Names and texts of the special tokens that tokenizer_config.json lists."""
    config = read_tokenizer_config(directory)
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, or {} when there is none."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}") from None
    return config if isinstance(config, dict) else {}


# --- what a tokenizer's decoder does ------------------------------------------------------------------------------


def _decode_rules(tokenizer: Tokenizer) -> DecodeRules:
    if tokenizer.decoder is None:
        raise CheckpointError("the tokenizer has no decoder, so tokens cannot be turned into text")
    steps = list(_flatten(json.loads(tokenizer.decoder.__getstate__())))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRules(is_byte_level=True)
    _check_steps(steps, kinds)
    spaces_last = max((i for i, kind in enumerate(kinds) if kind in ("Replace", "Metaspace")), default=-1)
    return DecodeRules(
        is_byte_level=False,
        has_byte_fallback="ByteFallback" in kinds,
        num_leading_spaces=sum(int(step["start"]) for step in steps if step["type"] == "Strip"),
        strips_first_token=any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in steps),
        has_marks_in_bytes="ByteFallback" in kinds and spaces_last > kinds.index("ByteFallback"),
    )


def _check_steps(steps: Sequence[dict[str, Any]], kinds: Sequence[str]) -> None:
    """Raises CheckpointError unless the steps spell spaces and bytes token by token, then fuse, then strip."""
    if unknown := set(kinds) - set(_STEP_ORDER):
        raise CheckpointError(f"tokenizer decoder {', '.join(sorted(unknown))} is not supported")
    places = [_STEP_ORDER[kind] for kind in kinds]
    if places != sorted(places) or ("Strip" in kinds and "Fuse" not in kinds):
        raise CheckpointError(f"tokenizer decoders in the order {', '.join(kinds)} are not supported")
    for step in steps:
        if not _is_known_step(step):
            shown = {name: value for name, value in step.items() if name != "type"}
            raise CheckpointError(f"tokenizer decoder {step['type']} of {shown} is not supported")


def _is_known_step(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return step["pattern"] == {"String": SPACE_MARK} and bool(step["content"] == " ")
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == SPACE_MARK)
    return step["type"] != "Strip" or bool(step["content"] == " " and step["stop"] == 0)


def _flatten(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _fallback_byte(token: str) -> int | None:
    return int(token[3:5], 16) if _FALLBACK_BYTE.fullmatch(token) else None
