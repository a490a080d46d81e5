"""Waiting for what an event loop does in its own time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Runs the event loop until a condition holds; fails after ten seconds."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    return wait
