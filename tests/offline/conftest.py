"""A tiny random Llama with a real tokenizer and a chat template, in a directory; and an LLM of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from common.offline.llm import LLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café größer 日本語 🙂", "0 1 2 3 4 5 6 7 8 9"]
KEYWORDS: dict[str, Any] = {"num_gpu_blocks_override": 200, "num_threads": 1, "max_num_seqs": 16}


def _make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-chat")
    tokenizer = _make_tokenizer()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2], "chat_template": CHATML}))
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_p": 0.9}))
    return directory


@pytest.fixture(scope="session")
def shared_llm(model_dir: Path) -> LLM:
    return LLM(str(model_dir), **KEYWORDS)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Nothing is held after a test."""
    yield shared_llm
    assert_nothing_held(shared_llm)


@pytest.fixture
def make_llm(model_dir: Path) -> Callable[..., LLM]:
    return lambda **keywords: LLM(str(model_dir), **{**KEYWORDS, **keywords})


def assert_nothing_held(llm: LLM) -> None:
    scheduler = llm._engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.requests
    assert scheduler.cache.pool.num_used == 0
