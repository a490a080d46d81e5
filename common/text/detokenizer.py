"""Token ids to text, one at a time, exactly as decoding them all at once would.

    push(id) -> text that is certain now      finish() -> what was still held

Bytes that may begin a character are held back until it is complete or cannot be; then each maximal invalid part becomes
one U+FFFD, as the Unicode standard recommends and the tokenizers' own decoders do. Knows no stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from common.text.tokenizer import Piece, TextTokenizer

_MAX_CHARACTER_BYTES = 4


class _Joiner(Protocol):
    """Joins pieces of bytes into text; `dangling` bytes come from a prompt that ended inside a character."""

    def push(self, piece: Piece) -> str: ...
    def finish(self) -> str: ...


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
        dangling = _dangling_bytes(tokenizer, prompt_token_ids)
        self._joiner: _Joiner = (
            _ByteLevelJoiner(dangling) if tokenizer.rules.is_byte_level else _ByteFallbackJoiner(dangling)
        )
        self._num_to_strip = 0 if prompt_token_ids else tokenizer.rules.num_leading_spaces

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        if not piece.data or (piece.is_special and self._skip_special_tokens):
            return ""
        return self._strip(self._joiner.push(piece))

    def finish(self) -> str:
        return self._strip(self._joiner.finish())

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
        self._first = b""  # bytes that arrived while it is open whether they complete the dangling ones
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: Piece) -> str:
        if not self._dangling:
            return self._decoder.decode(piece.data)
        self._first += piece.data
        if (joined := _join_dangling(self._dangling, self._first)) is None:
            return ""
        self._dangling = b""
        return self._decoder.decode(joined)

    def finish(self) -> str:
        rest, self._dangling = (self._first if self._dangling else b""), b""
        return self._decoder.decode(rest, final=True)


class _ByteFallbackJoiner:
    """Pieces are whole characters, but for runs of byte tokens.

    A run counts as a whole (that is how the tokenizers library decodes it): one invalid byte in it turns every byte of
    the run into U+FFFD, so that it cannot be shown before it has ended.
    """

    def __init__(self, dangling: bytes) -> None:
        self._dangling = dangling
        self._run = b""

    def push(self, piece: Piece) -> str:
        if piece.is_byte:
            self._run += piece.data
            return ""
        return self._end_run() + piece.data.decode()

    def finish(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        dangling, self._dangling = self._dangling, b""
        if dangling and (text := _decode_strictly(dangling + run)) is not None:
            return text
        text = _decode_strictly(run)
        return "\ufffd" * len(run) if text is None else text


def _decode_strictly(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _join_dangling(dangling: bytes, following: bytes) -> bytes | None:
    """Both together if they form a character, `following` alone if they cannot, None while that is open."""
    needed = dangling + following[: _MAX_CHARACTER_BYTES - len(dangling)]
    for end in range(len(dangling) + 1, len(needed) + 1):
        try:
            text, _ = codecs.utf_8_decode(needed[:end], "strict", False)
        except UnicodeDecodeError:
            return following
        if text:
            return dangling + following
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
            try:
                _, num_decoded = codecs.utf_8_decode(tail, "strict", False)
            except UnicodeDecodeError:
                return b""
            return b"" if num_decoded else tail
        if tail[0] < 0x80:
            return b""
    return b""
