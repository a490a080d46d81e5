"""The same tokens whatever happens to a request on its way: every place it can be preempted at, every block size, chunk
size and prefix hit. On a tiny random model, so that the grid can be whole; two best tokens never tie there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.request import Request
from tests.engine_model.tiny import PROMPT, SAMPLINGS, STRANGER, Shortage

NUM_OUTPUTS = 24


def params(sampling: str) -> dict[str, Any]:
    return {**SAMPLINGS[sampling], "max_tokens": NUM_OUTPUTS, "ignore_eos": True}


@pytest.fixture(scope="module")
def right(tiny_model_dir: Any) -> dict[str, list[int]]:
    """Alone, cold, in one chunk, never preempted."""
    from tests.engine_model.conftest import Generator, build

    found = {}
    for sampling in SAMPLINGS:
        parts = build(tiny_model_dir, "--num-gpu-blocks-override", "100")
        one = Generator(parts.engine, parts.model_config.eos_token_ids)
        found[sampling] = one.generate({"p": PROMPT}, **params(sampling))["p"]
    assert found["greedy"] != found["seeded"]
    assert len(set(found["greedy"])) > 5, "the model repeats itself: a lost token would not be noticed"
    return found


def run_preempted(one: Any, shortage: Shortage, sampling: str, steps: set[int] | None) -> tuple[Request, int]:
    """PROMPT behind a stranger, preempted just before its steps of these numbers (None: before each that it may)."""
    stranger = one.add(STRANGER, max_tokens=400, ignore_eos=True)
    one.engine.step()
    request = one.add(PROMPT, **params(sampling))
    step = 0
    while not request.is_finished:
        runs = request.num_computed_tokens > 0 and request.status.value == "running"
        if runs and (steps is None or step in steps):
            shortage.sufferer = stranger.request_id
        if runs:
            step += 1
        one.engine.step()
        one.engine.scheduler.check_integrity()
    one.engine.abort(stranger.request_id)
    one.assert_nothing_held()
    return request, step


@pytest.mark.parametrize(
    ("block_size", "sampling"),
    [
        ("8", "greedy"),
        pytest.param("16", "seeded", marks=pytest.mark.slow),
        ("16", "everything"),
        pytest.param("32", "seeded", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("is_caching", [True, False], ids=["cached", "uncached"])
def test_preempted_at_every_step(
    tiny_generator: Callable[..., Any],
    right: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    block_size: str,
    sampling: str,
    mode: str,
    is_caching: bool,
) -> None:
    """Chunks of 16 beside a stranger: a preemption in each and at each output, one at a time, then all of them."""
    flags = ["--block-size", block_size, "--preemption-mode", mode, "--swap-space", "1MiB"]
    flags += [
        "--max-num-batched-tokens",
        "16",
        "--enable-prefix-caching" if is_caching else "--no-enable-prefix-caching",
    ]
    one = tiny_generator(*flags)
    shortage = Shortage(one.engine.scheduler.cache, monkeypatch)
    request, num_steps = run_preempted(one, shortage, sampling, set())
    assert request.output_token_ids == right[sampling]
    assert request.num_preemptions == 0
    assert num_steps >= NUM_OUTPUTS
    for step in range(num_steps):
        one.engine.reset_prefix_cache()
        request, _ = run_preempted(one, shortage, sampling, {step})
        assert request.num_preemptions == 1
        assert request.output_token_ids == right[sampling], f"preempted before step {step}"
    one.engine.reset_prefix_cache()
    request, _ = run_preempted(one, shortage, sampling, None)
    assert request.num_preemptions >= NUM_OUTPUTS - 1
    assert request.output_token_ids == right[sampling]
    swaps = one.engine.stats().num_swap_preemptions
    assert swaps == (one.engine.stats().num_preemptions if mode == "swap" else 0)


@pytest.mark.parametrize("block_size", ["8", "16", "32"])
@pytest.mark.parametrize("budget", ["3", "16", "17", "512"])
@pytest.mark.parametrize("sampling", ["greedy", "everything"])
def test_chunks_blocks_and_prefix_hits(
    tiny_generator: Callable[..., Any], right: dict[str, list[int]], block_size: str, budget: str, sampling: str
) -> None:
    one = tiny_generator("--block-size", block_size, "--max-num-batched-tokens", budget)
    for num_cached in (0, 1, 31, 32, 33, 43, 60):  # the prefix that an earlier request left
        one.engine.reset_prefix_cache()
        if num_cached:
            one.generate({"q": [*PROMPT, *right[sampling]][:num_cached]}, max_tokens=1)
        assert one.generate({"p": PROMPT}, **params(sampling))["p"] == right[sampling]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_among_32_strangers_at_every_slot_of_the_batch(
    tiny_generator: Callable[..., Any], right: dict[str, list[int]], sampling: str
) -> None:
    """The slot is by arrival: so many strangers come first."""
    one = tiny_generator("--num-gpu-blocks-override", "600")
    for slot in range(0, 33, 4):
        strangers = {f"s{i}": [(i * 31 + j * 17) % 199 for j in range(1 + i)] for i in range(32)}
        before, after = list(strangers.items())[:slot], list(strangers.items())[slot:]
        outputs = one.generate({**dict(before), "p": PROMPT, **dict(after)}, **params(sampling))
        assert outputs["p"] == right[sampling]
        one.engine.reset_prefix_cache()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_among_strangers_in_a_pool_that_is_too_small(
    tiny_generator: Callable[..., Any], right: dict[str, list[int]], sampling: str, mode: str
) -> None:
    flags = ["--num-gpu-blocks-override", "18", "--max-model-len", "136", "--block-size", "8", "--swap-space", "1MiB"]
    one = tiny_generator(*flags, "--preemption-mode", mode, "--max-num-batched-tokens", "24")
    strangers = {f"s{i}": [(i * 31 + j * 17) % 199 for j in range(5 + 3 * i)] for i in range(9)}
    outputs = one.generate({**strangers, "p": PROMPT}, **params(sampling))
    assert outputs["p"] == right[sampling]
    assert one.engine.stats().num_preemptions >= 2
