"""Admission: how a request's KV comes in. A scripted engine and scripted fetches, no socket and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from common.messages import Source
from common.request import Request
from common.sampling_params import SamplingParams
from decode_node.admission import Admission
from kvtransfer.store import FetchListener, FetchRequest

BLOCK = 16
ROW = np.arange(4, dtype=np.float32)


@dataclass
class ScriptedEngine:
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def record(*args: Any) -> None:
            self.calls.append((name, *[a if isinstance(a, str | int) else type(a).__name__ for a in args]))

        return record


@dataclass
class ScriptedFetch:
    source: Source
    request: FetchRequest
    listener: FetchListener
    grants: list[tuple[int, list[int]]] = field(default_factory=list)
    is_cancelled: bool = False

    def grant(self, first_block: int, block_ids: Sequence[int]) -> None:
        self.grants.append((first_block, list(block_ids)))

    def cancel(self) -> None:
        self.is_cancelled = True


class Scene:
    """One admission with everything around it scripted."""

    def __init__(self, num_tokens: int, num_sources: int = 1) -> None:
        self.engine = ScriptedEngine()
        self.fetches: list[ScriptedFetch] = []
        self.request = Request("r#1", list(range(num_tokens)), SamplingParams())
        self.admission = Admission(
            self.request,
            [Source(f"p{i}", ["tcp://127.0.0.1:1"]) for i in range(num_sources)],
            engine=self.engine,
            open_fetch=self._open,
            post=lambda callback, *args: callback(*args),
            block_size=BLOCK,
            hidden_size=len(ROW),
            queue_seconds=5.0,
        )
        self.admission.start()

    def _open(self, source: Source, request: FetchRequest, listener: FetchListener) -> ScriptedFetch:
        self.fetches.append(ScriptedFetch(source, request, listener))
        return self.fetches[-1]

    @property
    def fetch(self) -> ScriptedFetch:
        return self.fetches[-1]

    def commands(self) -> list[tuple[Any, ...]]:
        return [call for call in self.engine.calls if call[0] != "add"]


def blocks_for(num_tokens: int) -> list[int]:
    return list(range(100, 100 + -(-num_tokens // BLOCK) + 1))


def test_without_sources_the_engine_computes() -> None:
    scene = Scene(40, num_sources=0)
    assert scene.engine.calls == [("add", "Request")]
    assert not scene.request.wants_remote_kv
    assert not scene.fetches


def test_fetch_opens_before_blocks_are_reserved_and_is_granted_after() -> None:
    scene = Scene(40)
    assert scene.request.wants_remote_kv
    assert scene.fetch.request.hidden == "last"
    assert scene.fetch.grants == []
    scene.admission.reserved(0, blocks_for(40))
    assert scene.fetch.grants == [(0, [100, 101, 102])]


def test_only_what_the_own_cache_lacks_is_granted() -> None:
    scene = Scene(40)
    scene.admission.reserved(16, blocks_for(40))
    assert scene.fetch.grants == [(1, [101, 102])]


def test_less_than_a_block_missing_is_computed_here() -> None:
    scene = Scene(40)
    scene.admission.reserved(32, blocks_for(40))
    assert scene.fetch.is_cancelled
    assert scene.fetch.grants == []
    scene.fetch.listener.ended(num_complete_blocks=0, error="cancelled")
    assert scene.commands() == [("adopt", "r#1", 32)]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33])
def test_whole_fetch_is_adopted(num_tokens: int) -> None:
    scene = Scene(num_tokens)
    scene.admission.reserved(0, blocks_for(num_tokens))
    if num_tokens < BLOCK:
        scene.fetch.listener.ended(num_complete_blocks=0, error="cancelled")
        assert scene.commands() == [("adopt", "r#1", 0)]
        return
    scene.fetch.listener.hidden(ROW.tobytes())
    scene.fetch.listener.ended(num_complete_blocks=-(-num_tokens // BLOCK), error=None)
    assert scene.commands() == [("add_hidden", "r#1", "ndarray"), ("adopt", "r#1", num_tokens)]


def test_hidden_before_the_reservation_waits_for_it() -> None:
    scene = Scene(40)
    scene.fetch.listener.hidden(ROW.tobytes())
    assert scene.commands() == []
    scene.admission.reserved(0, blocks_for(40))
    assert scene.commands() == [("add_hidden", "r#1", "ndarray")]


def test_failed_fetch_goes_to_the_next_source_from_the_first_missing_block() -> None:
    scene = Scene(100, num_sources=2)
    scene.admission.reserved(0, blocks_for(100))
    scene.fetch.listener.ended(num_complete_blocks=3, error="peer silent")
    assert [f.source.instance_id for f in scene.fetches] == ["p0", "p1"]
    assert scene.fetch.grants == [(3, [103, 104, 105, 106])]
    assert scene.commands() == []


def test_last_source_failed_keeps_complete_blocks_and_computes_the_rest() -> None:
    scene = Scene(100)
    scene.admission.reserved(0, blocks_for(100))
    scene.fetch.listener.ended(num_complete_blocks=3, error="peer silent")
    assert scene.commands() == [("adopt", "r#1", 48)]


def test_source_lost_after_hidden_fetches_full_blocks_only() -> None:
    scene = Scene(40, num_sources=2)
    scene.admission.reserved(0, blocks_for(40))
    scene.fetch.listener.hidden(ROW.tobytes())
    scene.fetch.listener.ended(num_complete_blocks=1, error="peer silent")
    assert scene.fetch.request.hidden == "none"
    assert len(scene.fetch.request.tokens) == 32
    scene.fetch.listener.ended(num_complete_blocks=2, error=None)
    assert scene.commands() == [("add_hidden", "r#1", "ndarray"), ("adopt", "r#1", 32)]


def test_fetch_failed_before_the_reservation_gives_up_on_remote_kv() -> None:
    scene = Scene(40)
    scene.fetch.listener.ended(num_complete_blocks=0, error="refused")
    assert scene.commands() == [("cancel_remote", "r#1")]


def test_reservation_that_crossed_the_failure_is_adopted() -> None:
    scene = Scene(40)
    scene.fetch.listener.ended(num_complete_blocks=0, error="refused")
    scene.admission.reserved(16, blocks_for(40))
    assert scene.commands()[-1] == ("adopt", "r#1", 16)


def test_blocks_of_an_ended_request_go_back_after_the_fence() -> None:
    scene = Scene(40)
    scene.admission.reserved(0, blocks_for(40))
    scene.admission.end()
    assert scene.fetch.is_cancelled
    assert scene.commands() == []
    assert not scene.admission.is_over
    scene.fetch.listener.ended(num_complete_blocks=1, error="cancelled")
    assert scene.commands() == [("release_reservation", "r#1")]
    assert scene.admission.is_over


def test_revoked_reservation_is_given_back_after_the_fence_and_fetched_anew_when_there_is_room() -> None:
    scene = Scene(40)
    scene.admission.reserved(0, blocks_for(40))
    scene.admission.revoked()
    assert scene.commands() == []
    scene.fetches[0].listener.ended(num_complete_blocks=1, error="cancelled")
    assert scene.commands() == [("release_reservation", "r#1")]
    assert len(scene.fetches) == 1
    scene.admission.reserved(16, blocks_for(40))
    assert len(scene.fetches) == 2
    assert scene.fetch.grants == [(1, [101, 102])]


def test_revocation_that_crossed_the_adoption_releases_no_later_reservation() -> None:
    scene = Scene(40)
    scene.admission.reserved(0, blocks_for(40))
    scene.fetch.listener.ended(num_complete_blocks=3, error=None)
    scene.admission.revoked()  # decided before the engine saw the `adopt`, which gives the blocks back by itself
    assert scene.commands() == [("adopt", "r#1", 40)]
    scene.admission.reserved(0, blocks_for(40))
    assert scene.fetch.grants == [(0, [100, 101, 102])]
    assert scene.commands() == [("adopt", "r#1", 40)]


@pytest.mark.parametrize("error", ["not_collected: others need the room", "queue_timeout: 60 s"])
def test_source_that_did_not_wait_for_us_is_asked_again_once_there_is_room(error: str) -> None:
    scene = Scene(40)
    scene.fetch.listener.hidden(ROW.tobytes())
    scene.fetch.listener.ended(num_complete_blocks=0, error=error)
    assert scene.commands() == []
    scene.admission.reserved(0, blocks_for(40))
    assert len(scene.fetches) == 2
    assert scene.fetch.request.hidden == "none"
    assert scene.fetch.grants == [(0, [100, 101, 102])]  # the fetch takes as many as it needs
    scene.fetch.listener.ended(num_complete_blocks=0, error=error)  # now it keeps us waiting
    assert scene.commands() == [("add_hidden", "r#1", "ndarray"), ("adopt", "r#1", 0)]


def test_source_with_a_long_queue_gives_way_to_another_one() -> None:
    scene = Scene(40, num_sources=2)
    scene.fetch.listener.ended(num_complete_blocks=0, error="queue_timeout: 60 s")
    assert [f.source.instance_id for f in scene.fetches] == ["p0", "p1"]


def test_events_of_an_earlier_fetch_are_ignored() -> None:
    scene = Scene(100, num_sources=2)
    scene.admission.reserved(0, blocks_for(100))
    first = scene.fetch
    first.listener.ended(num_complete_blocks=0, error="peer silent")
    first.listener.hidden(ROW.tobytes())
    first.listener.ended(num_complete_blocks=7, error=None)
    assert scene.commands() == []


def test_cached_tokens_of_the_source_are_noted() -> None:
    scene = Scene(40)
    scene.fetch.listener.accepted(32)
    assert scene.admission.num_source_cached_tokens == 32
