"""Node pool, routing and admission without sockets: what they decide, on a clock that stands still."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common import messages as m
from common.errors import OverloadedError, PeerError, UnavailableError
from common.kv_layout import KVLayout
from proxy.admission import Admission, AdmissionLimits
from proxy.node_pool import NodePool
from proxy.routing import MAX_SOURCES, Need, choose_route

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", model_fingerprint="x")


def hello(role: m.Role = "decode", **changes: Any) -> m.Hello:
    fields: dict[str, Any] = {
        "protocol_version": m.PROTOCOL_VERSION,
        "role": role,
        "model": "tiny",
        "layout": LAYOUT,
        "max_model_len": 128,
        "vocab_size": 512,
        "max_num_seqs": 8,
        "fetch_endpoints": ["tcp://127.0.0.1:1"],
        "stats": m.NodeStats(num_blocks=100, num_free_blocks=100),
    }
    return m.Hello(**{**fields, **changes})


def make_pool(*names: str, **changes: Any) -> NodePool:
    """A pool of nodes whose names say their role: p1, d1, d2."""
    pool = NodePool(lease_seconds=5.0)
    for name in names:
        pool.register(name, hello("prefill" if name.startswith("p") else "decode", **changes), now=0.0)
    return pool


def status(**stats: int) -> m.Status:
    return m.Status(stats=m.NodeStats(**{"num_blocks": 100, "num_free_blocks": 100, **stats}))


def report(pool: NodePool, name: str, **stats: int) -> None:
    node = pool.get(name)
    assert node is not None
    node.update(status(**stats))


def route_to(pool: NodePool, num_tokens: int = 100, **need: Any) -> tuple[str, list[str]] | None:
    route = choose_route(pool, Need(num_tokens, **need), min_split_tokens=16)
    return None if route is None else (route.decode_node.instance_id, [s.instance_id for s in route.sources])


# --- pool -----------------------------------------------------------------------------------------------------------


def test_a_silent_node_expires_after_its_lease() -> None:
    pool = make_pool("d1", "d2")
    pool.heard("d1", 3.0)
    assert pool.expired(5.0) == []
    assert pool.expired(5.1) == ["d2"]
    assert pool.expired(8.1) == ["d1", "d2"]
    pool.remove("d2")
    assert pool.expired(100.0) == ["d1"]


def test_ready_needs_a_decode_node_that_takes_work() -> None:
    assert not make_pool("p1").is_ready
    pool = make_pool("p1", "d1")
    assert pool.is_ready
    node = pool.get("d1")
    assert node is not None
    node.update(m.Status(stats=node.stats, is_draining=True))
    assert not pool.is_ready


def test_a_misfit_is_told_both_values() -> None:
    pool = make_pool("d1")
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=32, dtype="float32", model_fingerprint="x")
    with pytest.raises(PeerError, match=r"block_size is 32 here, 16 there"):
        pool.register("d2", hello(layout=layout), now=0.0)
    assert pool.get("d2") is None
    pool.remove("d1")
    pool.register("d2", hello(layout=layout), now=0.0)  # an empty cluster takes any shape


def test_the_tokenizers_vocabulary_counts_too() -> None:
    pool = NodePool(lease_seconds=5.0, vocab_size=600)
    with pytest.raises(PeerError, match=r"512.*600"):
        pool.register("d1", hello(), now=0.0)


def test_own_requests_are_known_exactly_and_others_as_reported() -> None:
    pool = make_pool("d1")
    node = pool.get("d1")
    assert node is not None
    node.num_own_sequences = 3
    node.update(status(num_running=4, num_waiting=1))  # two of them another proxy's
    assert node.num_sequences == 5
    node.num_own_sequences = 1  # two of ours have ended since
    assert node.num_sequences == 3


# --- routing --------------------------------------------------------------------------------------------------------


def test_the_least_loaded_nodes_win() -> None:
    pool = make_pool("p1", "p2", "d1", "d2")
    report(pool, "d1", num_queued_tokens=500)
    report(pool, "p1", num_free_blocks=50)
    assert route_to(pool) == ("d2", ["p2", "p1"])


def test_what_was_dispatched_since_the_last_status_counts() -> None:
    pool = make_pool("d1", "d2")
    admission = Admission(pool)
    chosen = []
    for _ in range(4):
        route = admission._try(Need(100))
        assert route is not None
        chosen.append(route.decode_node.instance_id)
    assert sorted(chosen) == ["d1", "d1", "d2", "d2"]


def test_short_prompts_get_no_sources() -> None:
    pool = make_pool("p1", "d1")
    assert route_to(pool, num_tokens=15) == ("d1", [])
    assert route_to(pool, num_tokens=16) == ("d1", ["p1"])


def test_no_prefill_nodes_no_sources() -> None:
    assert route_to(make_pool("d1")) == ("d1", [])


def test_draining_and_paused_nodes_get_nothing() -> None:
    pool = make_pool("p1", "p2", "d1", "d2")
    for name in ("p1", "d1"):
        pool.pause(name)
    assert route_to(pool) == ("d2", ["p2"])
    pool.pause("d2")
    assert route_to(pool) is None
    report(pool, "d2")
    assert route_to(pool) is not None


def test_nodes_that_failed_a_request_are_avoided_if_there_are_others() -> None:
    pool = make_pool("d1", "d2")
    report(pool, "d2", num_queued_tokens=10_000)
    assert route_to(pool, avoid=frozenset({"d1"})) == ("d2", [])
    assert route_to(make_pool("d1"), avoid=frozenset({"d1"})) == ("d1", [])


def test_a_full_node_has_no_room() -> None:
    pool = make_pool("d1")
    report(pool, "d1", num_running=8)
    assert route_to(pool) is not None  # one more may wait on the node, so that a free slot is taken up at once
    report(pool, "d1", num_running=8, num_waiting=1)
    assert route_to(pool) is None


def test_a_request_needs_a_seat_for_each_of_its_sequences() -> None:
    pool = make_pool("d1")
    assert route_to(pool, num_sequences=8) is not None
    assert route_to(pool, num_sequences=9) is None  # it could never run as a whole, though a ninth may wait
    report(pool, "d1", num_running=3)
    assert route_to(pool, num_sequences=6) is not None
    assert route_to(pool, num_sequences=7) is None
    pool.register("d2", hello(max_num_seqs=16), now=0.0)
    assert route_to(pool, num_sequences=9) == ("d2", [])
    assert pool.max_num_seqs == 16
    node = pool.get("d2")
    assert node is not None
    node.update(m.Status(stats=node.stats, is_draining=True))
    assert pool.max_num_seqs == 8
    assert make_pool("p1").max_num_seqs is None


def test_sources_fit_into_a_message() -> None:
    pool = make_pool("d1", *[f"p{i}" for i in range(MAX_SOURCES + 4)])
    found = route_to(pool)
    assert found is not None
    assert len(found[1]) == MAX_SOURCES


# --- admission ------------------------------------------------------------------------------------------------------


def tight(pool: NodePool, **limits: Any) -> Admission:
    return Admission(pool, AdmissionLimits(**{"queue_seconds": 60.0, "node_wait_seconds": 60.0, **limits}))


async def fill(admission: Admission, count: int) -> list[Any]:
    return [await admission.place(Need(1)) for _ in range(count)]


async def test_a_released_place_goes_to_the_one_who_waits() -> None:
    admission = tight(make_pool("d1", max_num_seqs=1))
    first, _ = await fill(admission, 2)
    waiting = asyncio.create_task(admission.place(Need(1)))
    await asyncio.sleep(0)
    assert admission.num_waiting == 1
    admission.release(first)
    assert (await waiting).decode_node.instance_id == "d1"
    assert admission.num_waiting == 0


async def test_seats_are_given_back_one_by_one() -> None:
    pool = make_pool("d1", max_num_seqs=4)
    admission = tight(pool)
    route = await admission.place(Need(1, num_sequences=4))
    waiting = asyncio.create_task(admission.place(Need(1, num_sequences=3)))
    await asyncio.sleep(0)
    admission.release(route)
    assert admission.num_waiting == 1
    admission.release(route)  # four and one to spare: two of the first, three of the second
    assert (await waiting).decode_node.num_own_sequences == 5


async def test_nobody_waits_behind_one_that_fits_no_node() -> None:
    pool = make_pool("p1")
    admission = tight(pool, queue_seconds=0.01)
    large = asyncio.create_task(admission.place(Need(1, num_sequences=9)))
    small = asyncio.create_task(admission.place(Need(1)))
    await asyncio.sleep(0)
    pool.register("d1", hello(), now=0.0)
    admission.pump()
    assert (await small).decode_node.num_own_sequences == 1
    with pytest.raises(OverloadedError, match="room"):
        await large


async def test_one_who_waits_behind_one_who_leaves_is_placed_once() -> None:
    """Both in the moment in which room is made, before the first has left the queue."""
    pool = make_pool("d1", max_num_seqs=1)
    admission = tight(pool)
    placed = await fill(admission, 2)
    first, second = (asyncio.create_task(admission.place(Need(1))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    admission.release(placed[0])
    await asyncio.gather(first, return_exceptions=True)
    assert (await second).decode_node.num_own_sequences == 2
    assert admission.num_waiting == 0


async def test_priority_then_arrival() -> None:
    admission = tight(make_pool("d1", max_num_seqs=1))
    placed = await fill(admission, 2)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        placed.append(await admission.place(Need(1), priority=priority))
        order.append(name)

    tasks = [asyncio.create_task(wait(name, p)) for name, p in (("late", 1), ("a", 0), ("b", 0), ("first", -1))]
    await asyncio.sleep(0)
    for _ in range(4):
        admission.release(placed.pop(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["first", "a", "b", "late"]


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    pool = make_pool("d1", max_num_seqs=1)
    admission = tight(pool)
    await fill(admission, 2)
    old = asyncio.create_task(admission.place(Need(1)))
    await asyncio.sleep(0)
    pool.register("d2", hello(max_num_seqs=1), now=0.0)
    new = asyncio.create_task(admission.place(Need(1)))
    await asyncio.wait({old, new})
    assert admission.num_waiting == 0


async def test_a_full_queue_refuses_at_once() -> None:
    admission = tight(make_pool("d1", max_num_seqs=1), max_queue=0)
    await fill(admission, 2)
    with pytest.raises(OverloadedError, match="at most 0") as caught:
        await admission.place(Need(1))
    assert caught.value.retry_after_seconds >= 1


async def test_waits_have_an_end() -> None:
    admission = tight(make_pool("d1", max_num_seqs=1), queue_seconds=0.01)
    await fill(admission, 2)
    with pytest.raises(OverloadedError, match="room"):
        await admission.place(Need(1))
    with pytest.raises(UnavailableError, match="no decode node"):
        await tight(make_pool("p1"), node_wait_seconds=0.01).place(Need(1))
    assert admission.num_waiting == 0


async def test_patience_follows_the_nodes() -> None:
    pool = make_pool("d1", max_num_seqs=1)
    admission = tight(pool, node_wait_seconds=0.01)
    await fill(admission, 2)
    waiting = asyncio.create_task(admission.place(Need(1)))
    await asyncio.sleep(0)
    pool.remove("d1")
    admission.pump()
    with pytest.raises(UnavailableError, match="no decode node"):
        await waiting


async def test_a_full_node_that_comes_gives_more_patience() -> None:
    pool = make_pool("p1")
    admission = tight(pool, queue_seconds=0.3, node_wait_seconds=0.1)
    waiting = asyncio.create_task(admission.place(Need(1)))
    await asyncio.sleep(0)
    pool.register("d1", hello(max_num_seqs=1, stats=m.NodeStats(num_running=9)), now=0.0)
    admission.pump()
    with pytest.raises(OverloadedError, match=r"no decode node had room within 0\.3 s"):
        await waiting


async def test_one_who_leaves_just_when_it_is_placed_gives_the_place_back() -> None:
    pool = make_pool("d1", max_num_seqs=2)
    admission = tight(pool)
    first, second, _ = await fill(admission, 3)
    waiting = asyncio.create_task(admission.place(Need(1, num_sequences=2)))
    await asyncio.sleep(0)
    admission.release(first)
    admission.release(second)
    assert admission.num_waiting == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    node = pool.get("d1")
    assert node is not None
    assert node.num_own_sequences == 1
