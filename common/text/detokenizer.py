"""Token ids to text, one at a time, exactly as decoding them all at once would.

    push(id) -> text that is certain now, and where tokens start in it      finish() -> what was still held

Bytes that may begin a character are held back until it is complete or cannot be; then each maximal invalid part becomes
one U+FFFD, as the Unicode standard recommends and the tokenizers' own decoders do. Knows no stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.text.tokenizer import SPACE_MARK, DecodeRules, Piece, TextTokenizer

_MAX_CHARACTER_BYTES = 4
_NOTHING = Piece(b"", is_byte=True)  # breaks no run of byte tokens
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Decoded:
    """text: goes on where the last one ended.

    starts: of the tokens whose place is known now, in the order they were pushed: the first character, counted from the
        beginning of all text, that the token is a part of. A token of no text starts somewhere between its neighbours.
    """

    text: str
    starts: list[int] = field(default_factory=list)


class _Joiner(Protocol):
    """Joins pieces of bytes into texts: the first belongs to tokens placed before, each other one begins a token."""

    def push(self, piece: Piece) -> list[str]: ...
    def finish(self) -> list[str]: ...


class Detokenizer:
    """Incremental decoding of one answer.

    prompt_token_ids: when the answer continues them as one text (completions): a character that they leave unfinished
        may be completed by the answer, and nothing else of the prompt ever appears in it. Leave empty when the
        answer stands alone (chat).
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        rules = tokenizer.rules
        self._is_first = rules.strips_first_token
        self._num_to_strip = rules.num_leading_spaces
        self._num_characters = 0
        self._begin_after(prompt_token_ids)
        dangling = _dangling_bytes(tokenizer, prompt_token_ids)
        self._joiner: _Joiner = (
            _ByteLevelJoiner(dangling)
            if rules.is_byte_level
            else _ByteFallbackJoiner(dangling, rules, is_first=self._is_first)
        )

    def push(self, token_id: int) -> Decoded:
        return self._place(self._joiner.push(self._piece(token_id)))

    def finish(self) -> Decoded:
        return self._place(self._joiner.finish())

    def shows(self, token_id: int) -> bool:
        """Whether this token is any part of a text."""
        piece = self._tokenizer.piece(token_id)
        return bool(piece.data) and not (piece.is_special and self._skip_special_tokens)

    def _piece(self, token_id: int) -> Piece:
        if not self.shows(token_id):
            return _NOTHING
        piece = self._tokenizer.piece(token_id)
        is_first, self._is_first = self._is_first, False
        if is_first and not piece.is_byte:
            return Piece(self._tokenizer.decode([token_id], skip_special_tokens=False).encode())
        return piece

    def _place(self, texts: list[str]) -> Decoded:
        starts: list[int] = []
        parts: list[str] = []
        for i, text in enumerate(texts):
            if i:
                starts.append(self._num_characters)
            parts.append(self._strip(text))
            self._num_characters += len(parts[-1])
        return Decoded("".join(parts), starts)

    def _begin_after(self, prompt_token_ids: Sequence[int]) -> None:
        """What is stripped from a text's beginning is stripped from the prompt, if it has any text."""
        for token_id in prompt_token_ids:
            if not (self._is_first or self._num_to_strip):
                return
            if self.shows(token_id):
                self._is_first = False
                self._strip(self._tokenizer.token_text(token_id))

    def _strip(self, text: str) -> str:
        if self._num_to_strip and text:
            leading = text[: self._num_to_strip]
            kept = leading.lstrip(" ")
            text = kept + text[len(leading) :]
            self._num_to_strip = 0 if kept else self._num_to_strip - len(leading)
        return text


class _ByteLevelJoiner:
    """All pieces are bytes of one UTF-8 stream."""

    def __init__(self, dangling: bytes) -> None:
        self._dangling = dangling
        self._first: list[bytes] = []  # pieces that arrived while it is open whether they complete the dangling bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: Piece) -> list[str]:
        if not self._dangling:
            return self._decode(piece.data)
        self._first.append(piece.data)
        is_one = _is_one_character(self._dangling, b"".join(self._first))
        return [""] if is_one is None else self._decode_first(after=self._dangling if is_one else b"")

    def finish(self) -> list[str]:
        texts = self._decode_first(after=b"")
        texts[-1] += self._decoder.decode(b"", final=True)
        return texts

    def _decode(self, data: bytes) -> list[str]:
        before = ""
        held, _ = self._decoder.getstate()
        if held and not _is_beginning(held + data[:1]):
            before = self._decoder.decode(b"", final=True)
        return [before, self._decoder.decode(data)]

    def _decode_first(self, after: bytes) -> list[str]:
        self._dangling = b""
        self._decoder.decode(after)
        texts = [""]
        for data in self._first:
            before, own = self._decode(data)
            texts[-1] += before
            texts.append(own)
        self._first.clear()
        return texts


class _ByteFallbackJoiner:
    """Pieces are whole characters, but for runs of byte tokens.

    A run counts as a whole (that is how the tokenizers library decodes it): one invalid byte in it turns every byte of
    the run into U+FFFD, so that it cannot be shown before it has ended.
    """

    def __init__(self, dangling: bytes, rules: DecodeRules, *, is_first: bool) -> None:
        self._dangling = dangling
        self._run: list[bytes] = []  # a byte of each token, none of those that show nothing
        self._mark = SPACE_MARK  # what becomes of one that a run spells
        if rules.has_marks_in_bytes:
            self._mark = "" if is_first else " "
        self._has_marks_in_bytes = rules.has_marks_in_bytes

    def push(self, piece: Piece) -> list[str]:
        if piece.is_byte:
            self._run.append(piece.data)
            return [""]
        return [*self._end_run(), piece.data.decode()]

    def finish(self) -> list[str]:
        return self._end_run()

    def _end_run(self) -> list[str]:
        run, self._run = self._run, []
        dangling, self._dangling = self._dangling, b""
        texts = (_decode_each(run, dangling) if dangling else None) or _decode_each(run)
        mark = self._mark
        if self._has_marks_in_bytes:
            self._mark = " "
        if texts is None:
            return ["", *(_REPLACEMENT * len(data) for data in run)]
        return ["", *(text.replace(SPACE_MARK, mark) for text in texts)]


def _decode_each(run: Sequence[bytes], dangling: bytes = b"") -> list[str] | None:
    """The characters that each token completes; None when all together are no valid text."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(dangling)
        texts = [decoder.decode(data) for data in run]
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    return texts


def _is_beginning(data: bytes) -> bool:
    """Whether these bytes are a text, but for a character at the end that may still be completed."""
    if data[-2:-1] == b"\xed" and data[-1:] >= b"\xa0":  # of a surrogate; Python would wait for its third byte
        return False
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def _is_one_character(dangling: bytes, following: bytes) -> bool | None:
    """Whether the beginning of `following` completes the character that `dangling` begins; None while that is open."""
    needed = dangling + following[: _MAX_CHARACTER_BYTES - len(dangling)]
    for end in range(len(dangling) + 1, len(needed) + 1):
        if not _is_beginning(needed[:end]):
            return False
        if incomplete_tail(needed[:end]) == b"":
            return True
    return None


def _dangling_bytes(tokenizer: TextTokenizer, prompt_token_ids: Sequence[int]) -> bytes:
    """The bytes at the prompt's end that begin a character and do not end it (at most 3)."""
    tail = b""
    for token_id in reversed(prompt_token_ids[-_MAX_CHARACTER_BYTES:]):
        piece = tokenizer.piece(token_id)
        if piece.is_special or not (tokenizer.rules.is_byte_level or piece.is_byte):
            break
        tail = piece.data + tail
    return incomplete_tail(tail[-_MAX_CHARACTER_BYTES:])


def incomplete_tail(data: bytes) -> bytes:
    """The end of `data` that is a proper beginning of a UTF-8 character; empty when there is none."""
    for length in range(1, min(len(data), _MAX_CHARACTER_BYTES - 1) + 1):
        tail = data[-length:]
        if tail[0] >= 0xC0:  # a lead byte
            return tail if _is_beginning(tail) and not codecs.utf_8_decode(tail, "strict", False)[1] else b""
        if tail[0] < 0x80:
            return b""
    return b""
