"""A small real byte-level BPE tokenizer, and some in SentencePiece's style; all made here, none downloaded."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.text.tokenizer import TextTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "red blue green END! fine more text",
    "naïve café größer 日本語 🙂",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def byte_level() -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("Ġodd", normalized=False)])
    return TextTokenizer(tokenizer)


PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
PIECES += ["▁", "▁the", "▁fox", "he", "llo", "▁▁", "a▁b", " ", "é", "日", *"abcdefghijklmnop"]


def sentencepiece(*steps: decoders.Decoder, is_unigram: bool = False) -> TextTokenizer:
    if is_unigram:
        scores = [(piece, -float(i)) for i, piece in enumerate(PIECES)]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        vocab = {piece: i for i, piece in enumerate(PIECES)}
        tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("▁tool▁", normalized=False)])
    tokenizer.decoder = decoders.Sequence(list(steps))
    return TextTokenizer(tokenizer)


@pytest.fixture(scope="session")
def byte_fallback() -> TextTokenizer:
    """Llama 2's decoder."""
    return sentencepiece(
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    )


@pytest.fixture(scope="session")
def sentencepiece_styles(byte_fallback: TextTokenizer) -> dict[str, TextTokenizer]:
    space, byte, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    return {
        "llama": byte_fallback,
        "gemma": sentencepiece(space, byte, fuse),
        "two spaces": sentencepiece(space, byte, fuse, decoders.Strip(" ", 2, 0)),
        "unigram": sentencepiece(decoders.Metaspace(), is_unigram=True),
        "unigram, bytes after spaces": sentencepiece(decoders.Metaspace(), byte, is_unigram=True),
        "unigram, bytes before spaces": sentencepiece(byte, decoders.Metaspace(), is_unigram=True),
        "bytes before spaces, nothing stripped": sentencepiece(byte, decoders.Metaspace("▁", "never"), fuse),
    }
