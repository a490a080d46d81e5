"""Log-probabilities of prompts are transformers', in one chunk or many, beside others, preempted, cold and warm.

They are told in pieces without a gap, each token once, all before the first output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.events import Event, OutputEvent, ScoredEvent
from common.messages import TokenLogprobs
from common.request import Request
from tests.engine_model.conftest import Generator, real_model_dir, transformers_model
from tests.engine_model.tiny import PROMPT, STRANGER, Shortage

COUNT = 4
OTHER = [(i * 41 + 3) % 199 for i in range(100)]


def told(events: Sequence[Event], request: Request) -> list[TokenLogprobs]:
    """All that was said of its prompt."""
    found: list[TokenLogprobs] = []
    has_output = False
    own = {request.request_id, *(f"{request.request_id}/{number}" for number in range(3))}
    for event in events:
        if isinstance(event, OutputEvent) and event.request_id in own:
            has_output = True
        if isinstance(event, ScoredEvent) and event.request_id in own:
            assert not has_output
            assert event.start == 1 + len(found)
            found += event.logprobs
    assert has_output
    return found


def check(found: Sequence[TokenLogprobs], model_dir: Path, prompt: list[int], tolerance: float = 1e-4) -> None:
    with torch.inference_mode():
        rows = transformers_model(model_dir)(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for token_id, one, row in zip(prompt[1:], found, rows, strict=True):
        assert one.logprob == pytest.approx(float(row[token_id]), abs=tolerance)
        assert one.top_logprobs == pytest.approx(row.topk(COUNT).values.tolist(), abs=tolerance)
        for top_id, logprob in zip(one.top_token_ids, one.top_logprobs, strict=True):
            assert logprob == pytest.approx(float(row[top_id]), abs=tolerance)
        best = int((row > row[token_id] + tolerance).sum()) + 1
        assert best <= one.rank <= best + int(((row - row[token_id]).abs() <= tolerance).sum())


def add(one: Generator, prompt: list[int], **params: Any) -> Request:
    return one.add(prompt, **{"prompt_logprobs": COUNT, "max_tokens": 3, "ignore_eos": True, **params})


@pytest.mark.parametrize("block_size", ["8", "32"])
@pytest.mark.parametrize("budget", ["1", "7", "16", "17", "512"])
def test_in_chunks_cold_and_warm(
    tiny_generator: Callable[..., Generator], tiny_model_dir: Path, block_size: str, budget: str
) -> None:
    """What the cache has of a prompt is computed again while it is scored, and found again by others."""
    one = tiny_generator("--block-size", block_size, "--max-num-batched-tokens", budget, "--max-num-seqs", "1")
    plain = one.generate({"p": PROMPT}, max_tokens=3, ignore_eos=True)["p"]
    for _ in ("warm", "warm again"):
        request = add(one, PROMPT)
        check(told(one.finish(request), request), tiny_model_dir, PROMPT)
        assert request.output_token_ids == plain
        assert request.num_cached_tokens == 0
    one.engine.reset_prefix_cache()
    request = add(one, PROMPT)
    check(told(one.finish(request), request), tiny_model_dir, PROMPT)
    after = one.add(PROMPT, max_tokens=3, ignore_eos=True)
    one.finish(after)
    assert after.num_cached_tokens == len(PROMPT) // int(block_size) * int(block_size)
    one.assert_nothing_held()


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 16, 17, 18, 33])
def test_prompts_of_every_length(
    tiny_generator: Callable[..., Generator], tiny_model_dir: Path, num_tokens: int
) -> None:
    one = tiny_generator("--block-size", "8")
    request = add(one, OTHER[:num_tokens])
    check(told(one.finish(request), request), tiny_model_dir, OTHER[:num_tokens])


@pytest.mark.parametrize("budget", ["16", "64", "512"])
def test_several_at_once_among_strangers(
    tiny_generator: Callable[..., Generator], tiny_model_dir: Path, budget: str
) -> None:
    """Choices and beams, too: the prompt is theirs together."""
    one = tiny_generator("--max-num-batched-tokens", budget, "--max-num-seqs", "12", "--max-num-partial-prefills", "3")
    strangers = [one.add(OTHER[i:50], max_tokens=9, ignore_eos=True) for i in range(3)]
    scored = [add(one, PROMPT), add(one, OTHER), add(one, PROMPT[:20])]
    scored.append(one.add_choices(OTHER[:60], [0, 1, 2], prompt_logprobs=COUNT, temperature=1.0, seed=1, max_tokens=5))
    events = one.finish(*strangers, *scored)
    for request in scored:
        check(told(events, request), tiny_model_dir, list(request.prompt_token_ids))
    one.assert_nothing_held()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
def test_preempted_before_each_chunk(
    tiny_generator: Callable[..., Generator],
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    caching: str,
) -> None:
    flags = ["--block-size", "8", "--preemption-mode", mode, "--swap-space", "1MiB", caching]
    one = tiny_generator(*flags, "--max-num-batched-tokens", "12", "--max-num-seqs", "4")
    shortage = Shortage(one.engine.scheduler.cache, monkeypatch)
    for step in range(5):  # three more chunks, and what computes outputs 1 and 2
        one.engine.reset_prefix_cache()
        stranger = one.add(STRANGER, max_tokens=400, ignore_eos=True)
        one.step()
        request = add(one, PROMPT)
        events: list[Event] = []
        num_steps = 0
        while not request.is_finished:
            if request.status.value == "running" and request.num_computed_tokens:
                if num_steps == step:
                    shortage.sufferer = stranger.request_id
                num_steps += 1
            events += one.step()
        assert request.num_preemptions == 1
        check(told(events, request), tiny_model_dir, PROMPT)
        one.engine.abort(stranger.request_id)
        one.assert_nothing_held()


def test_of_the_real_model(generator: Callable[..., Generator], cases: dict[str, Any]) -> None:
    one = generator("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "100")
    prompts = [cases[name].prompt_token_ids for name in ("chat_unicode", "text_code", "length_257")]
    requests = [add(one, prompt) for prompt in prompts]
    events = one.finish(*requests)
    for prompt, request in zip(prompts, requests, strict=True):
        check(told(events, request), real_model_dir(), prompt)
    one.assert_nothing_held()
