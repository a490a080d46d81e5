"""A streaming load client for /v1/completions: what a user feels, token by token. Knows HTTP only."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp


@dataclass
class Sample:
    """One request's times, in seconds on one clock. `token_times` has one entry for each chunk with a token."""

    start: float
    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


async def stream(http: aiohttp.ClientSession, url: str, prompt: Sequence[int], max_tokens: int) -> Sample:
    """One greedy request; raises aiohttp.ClientResponseError when it is refused."""
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample(time.perf_counter())
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            if chunk["choices"] and not chunk["choices"][0].get("finish_reason"):
                sample.token_times.append(time.perf_counter())
            if chunk.get("usage"):
                sample.num_tokens = chunk["usage"]["completion_tokens"]
    return sample


async def run(
    url: str, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int
) -> tuple[list[Sample], float]:
    """All prompts, at most `concurrency` at once: samples and wall seconds."""
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(prompt: Sequence[int]) -> Sample:
            async with gate:
                return await stream(http, url, prompt, max_tokens)

        start = time.perf_counter()
        samples = await asyncio.gather(*[one(p) for p in prompts])
        return samples, time.perf_counter() - start


def filler(count: int, salt: int) -> list[int]:
    """A prompt of exactly `count` ordinary token ids that no cache knows for another salt."""
    return [1000 + (i * 37 + i // 7 + salt * 911) % 20000 for i in range(count)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
