"""FetchServer and FetchClient over real sockets and threads: what a node sees."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from benchmarks.slow_link import SlowLink
from common.errors import ConfigError, UnavailableError
from common.kv_layout import KVLayout
from common.messages import Source
from kvtransfer.client import FetchClient
from kvtransfer.server import FetchServer
from kvtransfer.session_server import ServerLimits
from kvtransfer.store import FetchRequest
from kvtransfer.transports.faulty import Faults, FaultyTransport
from kvtransfer.transports.loopback import LoopbackTransport
from kvtransfer.transports.registry import TransportSet
from kvtransfer.transports.zmq import ZmqTransport
from tests.kvtransfer.doubles import TINY_LAYOUT, RecordingListener, ScriptedStore, hidden_rows

MakeServer = Callable[..., tuple[FetchServer, Source]]
MakeReceiver = Callable[..., "Receiver"]  # type: ignore[name-defined] # noqa: F821 - in conftest
BLOCK_BYTES = TINY_LAYOUT.block_bytes


@pytest.mark.parametrize("endpoints", [("tcp://127.0.0.1:0",), ("ipc://*",), ("tcp://127.0.0.1:0", "ipc://*")])
def test_a_whole_fetch(make_server: MakeServer, make_receiver: MakeReceiver, endpoints: tuple[str, ...]) -> None:
    store = ScriptedStore()
    server, source = make_server(store, endpoints=endpoints)
    receiver = make_receiver()
    fetching = receiver.fetch(source, 100)
    fetching.wait_complete()
    store.wait_for(lambda: not store.fetches)
    assert fetching.listener.wait_for("hidden") == hidden_rows(fetching.request.tokens)
    assert fetching.listener.names()[0] == "accepted"
    assert receiver.client.stats.fetches == {"complete": 1}
    assert receiver.client.stats.num_bytes_received > 13 * BLOCK_BYTES
    assert server.stats.num_bytes_sent == receiver.client.stats.num_bytes_received


def test_a_whole_fetch_over_loopback(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    transports = TransportSet({"loopback": LoopbackTransport()})
    _, source = make_server(ScriptedStore(), endpoints=("loopback://prefill",), transports=transports)
    make_receiver(transports=transports).fetch(source, 100).wait_complete()


def test_only_what_is_missing_comes(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    server, source = make_server(ScriptedStore())
    receiver = make_receiver()
    fetching = receiver.fetch(source, 100, first_block=10)
    fetching.wait_complete()
    assert server.stats.num_bytes_sent < 4 * BLOCK_BYTES
    # everything but the three blocks granted is as it was
    untouched = set(range(256)) - set(fetching.block_ids)
    assert all(receiver.block(block_id) == b"\xaa" * BLOCK_BYTES for block_id in untouched)


def test_nothing_missing_but_the_hidden_state(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    _, source = make_server(ScriptedStore())
    fetching = make_receiver().fetch(source, 64, first_block=8)
    fetching.wait_complete()
    assert "hidden" in fetching.listener.names()


def test_hidden_states_come_without_any_credit(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(is_automatic=True)
    server, source = make_server(store)
    fetching = make_receiver().fetch(source, 1000, first_block=None)
    fetching.listener.wait_for("hidden")
    assert server.stats.num_bytes_sent < BLOCK_BYTES
    assert store.fetches  # pinned until they are collected
    fetching.grant(0)
    fetching.wait_complete()
    store.wait_for(lambda: not store.fetches)


def test_hidden_states_alone(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    _, source = make_server(ScriptedStore())
    fetching = make_receiver().fetch(source, 100, first_block=None, units=False)
    assert fetching.listener.wait_ended() is None
    assert fetching.listener.names()[-2:] == ["hidden", "ended"]
    assert fetching.listener.num_complete_blocks == 0


def test_blocks_come_while_later_ones_are_computed(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(is_automatic=False)
    _, source = make_server(store)
    receiver = make_receiver()
    fetching = receiver.fetch(source, 32)
    (key,) = store.wait_open()
    store.fetches[key].events.accepted(0)
    store.fill(key, 2)
    store.fetches[key].events.progress(16)
    deadline = time.monotonic() + 10
    while receiver.block(fetching.block_ids[1])[:1] == b"\xaa":
        assert time.monotonic() < deadline, "the first blocks did not come before the last were computed"
        time.sleep(0.001)
    assert fetching.listener.names() == ["accepted"]
    store.fill(key, 2)
    store.finish(key)
    fetching.wait_complete()


def test_output_0_is_possible_long_before_the_last_block(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    """On a slow link the hidden state passes all the blocks that wait for credit."""
    store = ScriptedStore(num_blocks=600)
    _, source = make_server(store, endpoints=("tcp://127.0.0.1:0",))
    port = int(source.endpoints[0].rpartition(":")[2])
    num_tokens = 500 * TINY_LAYOUT.block_size
    with SlowLink("127.0.0.1", port, bytes_per_second=500_000) as link:
        receiver = make_receiver(num_blocks=600, window_bytes=16 * BLOCK_BYTES)
        started = time.monotonic()
        fetching = receiver.fetch(Source("server", [link.endpoint]), num_tokens)
        fetching.listener.wait_for("hidden")
        until_hidden = time.monotonic() - started
        fetching.wait_complete()
        until_end = time.monotonic() - started
        receiver.client.close()
    assert until_end > 0.4  # 250 KiB at 500 kB/s
    assert until_hidden < until_end / 3


def test_a_cancel_releases_the_blocks_at_once(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(is_automatic=False)
    server, source = make_server(store)
    fetching = make_receiver().fetch(source, 100)
    (key,) = store.wait_open()
    store.fill(key, 3)
    started = time.monotonic()
    fetching.handle.cancel()
    store.wait_for(lambda: not store.fetches)
    assert time.monotonic() - started < 0.1
    assert fetching.listener.wait_ended() == "cancelled"
    fetching.assert_blocks_right()
    assert server.stats.fetches == {"cancelled": 1}
    fetching.handle.cancel()  # and again: nothing
    fetching.handle.grant(0, [1])


def test_many_fetches_at_once(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(num_blocks=64 * 16)
    server, source = make_server(store)
    receiver = make_receiver(num_blocks=64 * 16, window_bytes=4 * BLOCK_BYTES)
    rng = random.Random(3)
    fetches = [receiver.fetch(source, rng.randint(1, 120), base=number * 1000) for number in range(64)]
    for fetching in fetches:
        fetching.wait_complete()
    store.wait_for(lambda: not store.fetches)
    assert server.stats.fetches == {"complete": 64}


def test_opening_from_many_threads(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(num_blocks=1024)
    _, source = make_server(store)
    receivers = [make_receiver(f"client-{number}") for number in range(3)]
    fetches = []

    def run(number: int) -> None:
        for i in range(10):
            fetches.append(receivers[number % 3].fetch(source, 40, base=1000 * (number * 10 + i)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fetching in fetches:
        fetching.wait_complete()


@pytest.mark.parametrize("seed", range(6))
def test_bad_networks_end_fetches_but_never_falsify_them(
    make_server: MakeServer, make_receiver: MakeReceiver, seed: int
) -> None:
    faults = Faults(drop=0.02, duplicate=0.03, reorder=0.02, corrupt=0.02, close_after=60 if seed == 0 else None)
    faulty = FaultyTransport(ZmqTransport(), faults, seed)
    store = ScriptedStore(num_blocks=1024)
    _, source = make_server(store, lease_seconds=0.8)
    receiver = make_receiver(
        lease_seconds=0.8,
        connect_seconds=0.4,
        window_bytes=3 * BLOCK_BYTES,
        transports=TransportSet({"tcp": faulty, "ipc": faulty}),
    )
    fetches = [receiver.fetch(source, 30 + seed, base=number * 1000) for number in range(24)]
    for fetching in fetches:
        error = fetching.listener.wait_ended()
        fetching.assert_blocks_right()
        for name, rows in fetching.listener.told:
            assert name != "hidden" or rows == hidden_rows(fetching.request.tokens)
        assert error is None or error.partition(":")[0] in {
            "corrupt",
            "sequence_gap",
            "unknown_fetch",
            "unreachable",
            "connection_lost",
            "hello_required",
            "silent",
            "protocol_error",
        }, error
    store.wait_for(lambda: not store.fetches)
    receiver.client.close()
    faulty.close()
    assert faulty.counts["drop"] > 0


def test_a_server_that_closes_gracefully_finishes_what_is_open(
    make_server: MakeServer, make_receiver: MakeReceiver
) -> None:
    """D-21: no new work, and the transfer under way ends well."""
    store = ScriptedStore(is_automatic=False)
    server, source = make_server(store)
    receiver = make_receiver()
    fetching = receiver.fetch(source, 100)
    (key,) = store.wait_open()
    store.fill(key, 5)
    closing = threading.Thread(target=server.close, args=(20.0,))
    closing.start()
    late = receiver.fetch(source, 50)
    assert str(late.listener.wait_ended()).startswith("closing: ")
    store.fill(key, 8)
    store.finish(key)
    fetching.wait_complete()
    closing.join(5.0)
    assert not closing.is_alive()
    assert receiver.fetch(source, 50).listener.wait_ended()


def test_a_server_that_closes_at_once_says_so(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(is_automatic=False)
    server, source = make_server(store)
    fetching = make_receiver().fetch(source, 100)
    (key,) = store.wait_open()
    store.fill(key, 5)
    server.close()
    store.assert_all_released()
    assert fetching.listener.wait_ended() == "closing: the server closes"
    fetching.assert_blocks_right()


def test_a_client_that_closes_frees_the_server_at_once(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(is_automatic=False)
    _, source = make_server(store)
    receiver = make_receiver()
    fetching = receiver.fetch(source, 100)
    store.wait_open()
    receiver.client.close()
    assert str(fetching.listener.wait_ended(0)).startswith("closing: ")
    store.wait_for(lambda: not store.fetches, 0.5)
    with pytest.raises(UnavailableError):
        receiver.client.open(source, FetchRequest([1]), RecordingListener())


def test_a_client_that_vanishes_is_noticed_before_its_lease_ends(
    make_server: MakeServer, make_receiver: MakeReceiver
) -> None:
    """Its connection breaks: the next keep-alive cannot be sent."""
    faulty = FaultyTransport(ZmqTransport(), Faults(close_after=6), seed=0)
    store = ScriptedStore(is_automatic=False)
    _, source = make_server(store, endpoints=("tcp://127.0.0.1:0",), lease_seconds=60.0)
    receiver = make_receiver(lease_seconds=60.0, transports=TransportSet({"tcp": faulty}))
    fetching = receiver.fetch(source, 100)
    (key,) = store.wait_open()
    store.fetches[key].events.accepted(0)
    store.fill(key, 3)
    assert str(fetching.listener.wait_ended()).startswith("connection_lost: ")
    store.wait_for(lambda: not store.fetches, 5.0)
    receiver.client.close()
    faulty.close()


def test_nobody_at_the_address(make_receiver: MakeReceiver) -> None:
    started = time.monotonic()
    source = Source("server", ["tcp://127.0.0.1:1", "ipc:///no/such/socket"])
    error = make_receiver().fetch(source, 10).listener.wait_ended()
    assert str(error).startswith("unreachable: ")
    assert "server" in str(error)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("endpoint", ["ipc:///no/such/socket", "carrier-pigeon://roof", "nonsense"])
def test_addresses_of_no_use(make_receiver: MakeReceiver, endpoint: str) -> None:
    assert str(make_receiver().fetch(Source("server", [endpoint]), 10).listener.wait_ended()).startswith("unreachable")


def test_a_dead_socket_file_is_passed_over(
    make_server: MakeServer, make_receiver: MakeReceiver, tmp_path: os.PathLike[str]
) -> None:
    """A killed server leaves its file behind; the next endpoint is tried with the same fetches."""
    import socket

    dead = f"{tmp_path}/dead"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(dead)
    _, source = make_server(ScriptedStore(), endpoints=("tcp://127.0.0.1:0",))
    fetching = make_receiver().fetch(Source("server", [*source.endpoints, f"ipc://{dead}"]), 100)
    fetching.wait_complete()


def test_another_server_on_the_nearer_endpoint_is_passed_over(
    make_server: MakeServer, make_receiver: MakeReceiver
) -> None:
    _, meant = make_server(ScriptedStore(), "meant", ("tcp://127.0.0.1:0",))
    _, other = make_server(ScriptedStore(), "other", ("ipc://*",))
    source = Source("meant", [*meant.endpoints, *other.endpoints])
    make_receiver().fetch(source, 100).wait_complete()


def test_a_server_that_accepts_and_says_nothing(make_receiver: MakeReceiver) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        source = Source("server", [f"tcp://127.0.0.1:{deaf.getsockname()[1]}"])
        receiver = make_receiver(connect_seconds=0.3)
        assert str(receiver.fetch(source, 10).listener.wait_ended(5.0)).startswith("unreachable: ")


def test_an_idle_connection_is_dropped_and_made_again(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    _, source = make_server(ScriptedStore())
    receiver = make_receiver(idle_seconds=0.05)
    receiver.fetch(source, 20).wait_complete()
    deadline = time.monotonic() + 5
    while receiver.client._links:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    receiver.fetch(source, 20).wait_complete()


def test_a_server_that_forgot_an_idle_client_serves_it_again(
    make_server: MakeServer, make_receiver: MakeReceiver
) -> None:
    """The connection outlives the server's lease: the HELLO before each first fetch makes it known again."""
    server, source = make_server(ScriptedStore(), lease_seconds=0.1)
    receiver = make_receiver()
    receiver.fetch(source, 20).wait_complete()
    deadline = time.monotonic() + 5
    while server._session.peers():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    receiver.fetch(source, 20).wait_complete()


def test_layouts_that_differ_are_refused_with_both_values(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore()
    _, source = make_server(store)
    layout = KVLayout(2, 1, 4, 8, "bfloat16", "tiny")
    error = str(make_receiver(layout=layout).fetch(source, 10, first_block=None).listener.wait_ended())
    assert error.startswith("layout_mismatch: ")
    assert "dtype float32" in error
    assert "dtype bfloat16" in error
    assert store.num_opened == 0


def test_a_store_that_refuses(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    class Refusing(ScriptedStore):
        def open(self, key, request, events) -> None:  # type: ignore[no-untyped-def]
            super().open(key, request, events)
            events.failed("held_blocks_full", "120 of 128 blocks are held")

    _, source = make_server(Refusing(is_automatic=False))
    error = make_receiver().fetch(source, 10).listener.wait_ended()
    assert error == "held_blocks_full: 120 of 128 blocks are held"


def test_a_store_or_listener_that_raises_harms_only_its_fetch(
    make_server: MakeServer, make_receiver: MakeReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(ScriptedStore):
        def open(self, key, request, events) -> None:  # type: ignore[no-untyped-def]
            super().open(key, request, events)
            if len(request.tokens) == 13:
                raise RuntimeError("boom")

    class RaisingListener(RecordingListener):
        def accepted(self, num_cached_tokens: int) -> None:
            raise RuntimeError("boom")

    _, source = make_server(Raising())
    receiver = make_receiver()
    assert str(receiver.fetch(source, 13).listener.wait_ended()).startswith("internal_error")
    listener = RaisingListener()
    receiver.client.open(source, FetchRequest([1] * 8), listener).grant(0, [200])
    assert listener.wait_ended() is None
    receiver.fetch(source, 14).wait_complete()


def test_too_many_fetches_are_refused(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(is_automatic=False)
    _, source = make_server(store, limits=ServerLimits(max_open_fetches=1))
    receiver = make_receiver()
    first = receiver.fetch(source, 10)
    store.wait_open()
    assert str(receiver.fetch(source, 10).listener.wait_ended()).startswith("too_many_fetches: 1 ")
    first.handle.cancel()


def test_a_pool_that_cannot_be_written_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="read-only"):
        FetchClient(TINY_LAYOUT, memoryview(bytes(512)), "client")


def test_closing_what_was_never_started() -> None:
    FetchClient(TINY_LAYOUT, memoryview(bytearray(512)), "client").close()
    FetchServer(ScriptedStore(), "server", ["tcp://127.0.0.1:0"]).close()


def test_an_idle_pair_does_not_spin(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    store = ScriptedStore(is_automatic=False)
    _, source = make_server(store)
    fetching = make_receiver().fetch(source, 100)
    store.wait_open()
    before = time.process_time()
    time.sleep(0.5)  # the thing measured, not a synchronisation
    assert time.process_time() - before < 0.1
    fetching.handle.cancel()


def test_two_servers_started_at_once_both_serve(make_server: MakeServer, make_receiver: MakeReceiver) -> None:
    """D-22: port 0 gives each a port of its own, and the bound one is advertised."""
    receiver = make_receiver()
    sources = [make_server(ScriptedStore(), f"server-{number}")[1] for number in range(8)]
    assert len({source.endpoints[0] for source in sources}) == 8
    assert not any(source.endpoints[0].endswith(":0") for source in sources)
    for fetching in [receiver.fetch(source, 20) for source in sources]:
        fetching.wait_complete()


def test_a_taken_port_fails_fast_and_is_named(make_server: MakeServer) -> None:
    _, source = make_server(ScriptedStore(), endpoints=("tcp://127.0.0.1:0",))
    second = FetchServer(ScriptedStore(), "second", source.endpoints)
    with pytest.raises(ConfigError, match=source.endpoints[0]):
        second.start()
    second.close()


def test_who_comes_back_to_talk_nonsense_does_not_fill_the_log(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server, source = make_server(ScriptedStore(), endpoints=("tcp://127.0.0.1:0",))
    with zmq.Context() as context:
        for _ in range(5):
            with context.socket(zmq.DEALER) as peer:
                peer.linger = 5000
                peer.connect(source.endpoints[0])
                peer.send(b"nonsense")
                peer.send_multipart([b"more", b"of it"])
    deadline = time.monotonic() + 20
    while server.stats.dropped_frames["invalid"] < 10:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert caplog.text.count("a fetch client sent a bad message") == 1


def test_a_fetch_that_finds_no_file_descriptor_ends_and_the_next_one_works(
    make_server: MakeServer, make_receiver: MakeReceiver
) -> None:
    _, source = make_server(ScriptedStore())
    receiver = make_receiver()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        error = receiver.fetch(source, 10).listener.wait_ended()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert error == "unreachable: Too many open files"
    receiver.fetch(source, 10).wait_complete()
