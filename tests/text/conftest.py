"""A small real byte-level BPE tokenizer, and one in SentencePiece's style; both made here, none downloaded."""

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


@pytest.fixture(scope="session")
def byte_fallback() -> TextTokenizer:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", "▁the", "▁fox", "he", "llo", "▁▁", "é", "日", *"abcdefghijklmnop"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(tokenizer)
