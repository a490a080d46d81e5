"""The node's view of one proxy connection: order, gaps, leases, another instance at the same address."""

from __future__ import annotations

from common import messages as m
from common.control import ProxyLink

NODE = "node-1"
PROXY = "proxy-1"


def said(sequence: int, *, sender: str = PROXY, receiver: str = NODE, received: int = 0) -> m.Envelope:
    return m.Envelope(sender, receiver, sequence, received)


def joined_link(now: float = 0.0) -> ProxyLink:
    link = ProxyLink(NODE, now)
    link.accept(said(1), m.Welcome(heartbeat_seconds=0.5, lease_seconds=2.0), now)
    return link


def test_welcome_joins_and_sets_the_pace() -> None:
    link = joined_link()
    assert link.is_joined
    assert (link.proxy_id, link.heartbeat_seconds, link.lease_seconds) == (PROXY, 0.5, 2.0)


def test_envelopes_count_up_and_repeat_what_was_received() -> None:
    link = joined_link()
    first, second = link.envelope(), link.envelope()
    assert second.sequence == first.sequence + 1
    assert first.received == 1
    assert first.receiver == PROXY


def test_message_in_order_is_delivered_without_hello() -> None:
    delivery = joined_link().accept(said(2), m.Heartbeat(), 0.1)
    assert isinstance(delivery.message, m.Heartbeat)
    assert not delivery.needs_hello


def test_gap_delivers_the_message_and_asks_for_a_snapshot() -> None:
    delivery = joined_link().accept(said(4), m.Abort(request_id="r", leg=1), 0.1)
    assert isinstance(delivery.message, m.Abort)
    assert delivery.needs_hello


def test_rehello_asks_for_a_snapshot() -> None:
    assert joined_link().accept(said(2), m.Rehello(), 0.1).needs_hello


def test_message_before_welcome_is_not_delivered() -> None:
    delivery = ProxyLink(NODE, 0.0).accept(said(7), m.Heartbeat(), 0.0)
    assert delivery.message is None
    assert delivery.needs_hello


def test_message_for_another_instance_is_ignored() -> None:
    link = joined_link()
    delivery = link.accept(said(2, receiver="earlier-process"), m.Abort(request_id="r", leg=1), 0.1)
    assert delivery.message is None
    assert not delivery.needs_hello


def test_silence_past_the_lease_loses_the_proxy_once() -> None:
    link = joined_link(now=10.0)
    assert link.expire(12.0) is None
    assert link.expire(12.1) == PROXY
    assert not link.is_joined
    assert link.expire(99.0) is None


def test_another_proxy_at_the_address_loses_the_first() -> None:
    link = joined_link()
    delivery = link.accept(said(1, sender="proxy-2"), m.Heartbeat(), 0.1)
    assert delivery.lost_proxy_id == PROXY
    assert delivery.needs_hello


def test_refusal_is_kept_for_the_log_until_welcomed() -> None:
    link = ProxyLink(NODE, 0.0)
    link.accept(said(1), m.Refused(reason="block size 16, cluster has 32"), 0.0)
    assert link.refusal == "block size 16, cluster has 32"
    assert not link.is_joined
    link.accept(said(2), m.Welcome(heartbeat_seconds=1.0, lease_seconds=5.0), 0.1)
    assert link.refusal is None
