"""`AsyncLLM`: outputs that grow, and requests that end before their time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest

from common.errors import InvalidRequestError
from common.offline.async_llm import AsyncLLM
from common.offline.outputs import RequestOutput
from common.offline.params import SamplingParams

KEYWORDS = {"num_gpu_blocks_override": 200, "num_threads": 1}
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture
async def llm(model_dir: Path) -> AsyncIterator[AsyncLLM]:
    found = AsyncLLM(str(model_dir), **KEYWORDS)
    yield found
    await asyncio.to_thread(found._engine.check_integrity)  # behind every abort
    stats = found._engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert not found._streams
    await found.shutdown()


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
    async for output in llm.generate(prompt, params):
        found = output
    return found


async def test_outputs_grow_to_the_last(llm: AsyncLLM) -> None:
    params = SamplingParams(n=2, temperature=1.2, seed=3, max_tokens=12, ignore_eos=True)
    outputs = [output async for output in llm.generate("the fox", params)]
    assert len(outputs) > 2
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in pairwise(outputs):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
    assert [len(answer.token_ids) for answer in outputs[-1].outputs] == [12, 12]


async def test_many_at_once_give_what_each_gives_alone(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=10)
    prompts = [f"the {i}" for i in range(12)]
    together = await asyncio.gather(*(last(llm, prompt, params) for prompt in prompts))
    for prompt, output in zip(prompts, together, strict=True):
        assert (await last(llm, prompt, params)).outputs == output.outputs


async def test_leaving_early_aborts_it(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate("the", LONG)) as outputs:
        async for output in outputs:
            assert not output.finished
            break
    task = asyncio.create_task(last(llm, "the", LONG))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_abort_by_id_ends_the_iteration(llm: AsyncLLM) -> None:
    outputs: list[RequestOutput] = []
    async for output in llm.generate("the", LONG, request_id="mine"):
        outputs.append(output)
        await llm.abort("mine")
    assert len(outputs) == 1
    assert not outputs[0].finished
    await llm.abort("unknown")


async def test_a_stop_text_ends_one_answer_early(llm: AsyncLLM) -> None:
    free = await last(llm, "the", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    stop = free.outputs[0].text[5:8]
    stopped = await last(llm, "the", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop))
    assert stopped.outputs[0].text == free.outputs[0].text.split(stop)[0]
    assert stopped.outputs[0].stop_reason == stop


async def test_chat_and_beams(llm: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "fox"}]
    async for output in llm.chat(messages, SamplingParams(n=2, use_beam_search=True, max_tokens=4)):
        assert output.finished, "beams come when the search is over"
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")


async def test_wrong_requests_raise_and_others_go_on(llm: AsyncLLM) -> None:
    running = asyncio.create_task(last(llm, "the", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
    with pytest.raises(InvalidRequestError, match="temperature is -1"):
        await last(llm, "the", SamplingParams(temperature=-1.0))
    async for _ in llm.generate("the", LONG, request_id="twice"):
        with pytest.raises(InvalidRequestError, match="'twice' is in use"):
            await anext(llm.generate("the", LONG, request_id="twice"))
        break
    await llm.abort("twice")
    assert len((await running).outputs[0].token_ids) == 40


async def test_shutdown_ends_what_runs(model_dir: Path) -> None:
    llm = AsyncLLM(str(model_dir), **KEYWORDS)
    outputs = llm.generate("the", LONG)
    assert not (await anext(outputs)).finished
    await llm.shutdown()
    assert [output async for output in outputs] == []
    assert not llm._engine.is_alive
