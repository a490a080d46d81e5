"""Faults that users of other servers reported, as far as the transfer has a part in them (shared case ids)."""

from __future__ import annotations

import time

import pytest

from kvtransfer.server import FetchServer
from tests.kvtransfer.doubles import TINY_LAYOUT, ScriptedStore

BLOCK_SIZE = TINY_LAYOUT.block_size


def test_d09_an_expired_hold_is_refused_and_never_serves_other_data(make_server, make_receiver) -> None:  # type: ignore[no-untyped-def]
    """The hold on the blocks ran out, others' prompts took them, and the late collector is told so."""
    store = ScriptedStore(num_blocks=16)
    _, source = make_server(store, hold_seconds=0.2)
    receiver = make_receiver()
    late = receiver.fetch(source, 100, first_block=None)
    late.listener.wait_for("hidden")
    store.wait_for(lambda: not store.fetches)  # expired: the blocks are scribbled over
    receiver.fetch(source, 100, base=7000).wait_complete()  # and used again
    late.grant(0)
    assert str(late.listener.wait_ended()).startswith("not_collected: ")
    assert late.listener.num_complete_blocks == 0
    assert all(receiver.block(block_id) == b"\xaa" * TINY_LAYOUT.block_bytes for block_id in late.block_ids)


def test_d09_a_collector_that_waits_and_says_so_keeps_its_hold(make_server, make_receiver) -> None:  # type: ignore[no-untyped-def]
    """Waiting longer than the lease costs nothing as long as keep-alives come."""
    store = ScriptedStore()
    _, source = make_server(store, lease_seconds=0.3)
    fetching = make_receiver().fetch(source, 100, first_block=None)
    fetching.listener.wait_for("hidden")
    time.sleep(0.9)  # the wait is the case itself: three leases
    fetching.grant(0)
    fetching.wait_complete()


@pytest.mark.parametrize("num_tokens", [4 * BLOCK_SIZE - 1, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1])
@pytest.mark.parametrize("first_block", [0, 1, 3, 4])
def test_d18_lengths_at_block_edges(make_server, make_receiver, num_tokens: int, first_block: int) -> None:  # type: ignore[no-untyped-def]
    """Exact multiples and their neighbours, whole and behind a prefix hit."""
    server, source = make_server(ScriptedStore())
    fetching = make_receiver().fetch(source, num_tokens, first_block=first_block)
    fetching.wait_complete()
    num_blocks = TINY_LAYOUT.num_blocks_for(num_tokens) - first_block
    assert len(fetching.block_ids) == num_blocks
    payload = num_blocks * TINY_LAYOUT.block_bytes
    assert payload <= server.stats.num_bytes_sent < payload + TINY_LAYOUT.block_bytes + 256


def test_d18_blocks_granted_beyond_the_prompt_stay_untouched(make_server, make_receiver) -> None:  # type: ignore[no-untyped-def]
    """A receiver may own one block more (for the first output): it is filled locally."""
    _, source = make_server(ScriptedStore())
    receiver = make_receiver()
    fetching = receiver.fetch(source, 4 * BLOCK_SIZE, first_block=None)
    fetching.block_ids = receiver.take_blocks(5)
    fetching.handle.grant(0, fetching.block_ids)
    fetching.wait_complete()
    assert receiver.block(fetching.block_ids[4]) == b"\xaa" * TINY_LAYOUT.block_bytes


def test_d22_twenty_simultaneous_double_starts() -> None:
    for _ in range(20):
        servers = [FetchServer(ScriptedStore(num_blocks=1), f"s{i}", ["tcp://127.0.0.1:0", "ipc://*"]) for i in (0, 1)]
        endpoints = [endpoint for server in servers for endpoint in server.start()]
        assert len(set(endpoints)) == 4
        for server in servers:
            server.close()
