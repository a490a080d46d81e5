"""Servers and clients over real threads, closed after each test; nothing of them may be left behind."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from common.messages import Source
from kvtransfer.client import ClientHandle, FetchClient
from kvtransfer.server import FetchServer
from kvtransfer.store import FetchRequest
from tests.kvtransfer.doubles import TINY_LAYOUT, RecordingListener, ScriptedStore, block_content

BLOCK_BYTES = TINY_LAYOUT.block_bytes


class Receiver:
    """A FetchClient with a pool, and what its owner would do with them."""

    def __init__(self, instance_id: str = "client", num_blocks: int = 256, **options: object) -> None:
        layout = options.pop("layout", TINY_LAYOUT)
        self.pool = bytearray([0xAA]) * (num_blocks * BLOCK_BYTES)
        self.client = FetchClient(layout, memoryview(self.pool), instance_id, **options)
        self._free = itertools.count()
        self.client.start()

    def fetch(
        self, source: Source, num_tokens: int, *, first_block: int | None = 0, base: int = 1000, **fields: object
    ) -> Fetching:
        """first_block None: grant nothing yet."""
        request = FetchRequest([base + i for i in range(num_tokens)], **fields)
        listener = RecordingListener()
        fetching = Fetching(self, request, listener, self.client.open(source, request, listener))
        if first_block is not None:
            fetching.grant(first_block)
        return fetching

    def take_blocks(self, num: int) -> list[int]:
        return [next(self._free) for _ in range(num)]

    def block(self, block_id: int) -> bytes:
        return bytes(self.pool[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES])


class Fetching:
    def __init__(
        self, receiver: Receiver, request: FetchRequest, listener: RecordingListener, handle: ClientHandle
    ) -> None:
        self.receiver = receiver
        self.request = request
        self.listener = listener
        self.handle = handle
        self.first_block = 0
        self.block_ids: list[int] = []

    def grant(self, first_block: int) -> None:
        self.first_block = first_block
        num_blocks = TINY_LAYOUT.num_blocks_for(len(self.request.tokens))
        self.block_ids = self.receiver.take_blocks(num_blocks - first_block)
        self.handle.grant(first_block, self.block_ids)

    def wait_complete(self) -> None:
        assert self.listener.wait_ended() is None
        assert self.listener.num_complete_blocks == TINY_LAYOUT.num_blocks_for(len(self.request.tokens))
        self.assert_blocks_right()

    def assert_blocks_right(self) -> None:
        """Every block that counts as complete is what the store holds."""
        for block in range(self.first_block, self.listener.num_complete_blocks):
            content = self.receiver.block(self.block_ids[block - self.first_block])
            assert content == block_content(self.request.tokens, block, TINY_LAYOUT)


def _descriptors() -> set[str]:
    """Open descriptors but pytest's own: what they refer to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    assert set(threading.enumerate()) <= threads
    left = _descriptors() - descriptors
    assert not left, left


@pytest.fixture
def make_receiver() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(*args: object, **options: object) -> Receiver:
        made.append(Receiver(*args, **options))
        return made[-1]

    yield make
    for receiver in made:
        receiver.client.close()


@pytest.fixture
def make_server() -> Iterator[Callable[..., tuple[FetchServer, Source]]]:
    """Makes a started server and the Source that names it; afterwards all it had opened is released."""
    made: list[tuple[FetchServer, ScriptedStore]] = []

    def make(
        store: ScriptedStore,
        instance_id: str = "server",
        endpoints: tuple[str, ...] = ("tcp://127.0.0.1:0", "ipc://*"),
        **options: object,
    ) -> tuple[FetchServer, Source]:
        server = FetchServer(store, instance_id, endpoints, **options)
        made.append((server, store))
        return server, Source(instance_id, server.start())

    yield make
    for server, store in made:
        server.close()
        store.assert_all_released()
