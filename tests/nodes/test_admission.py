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


def _shown(arg: Any) -> str | int | list[int]:
    """Of hidden states of a whole prompt, the token that each stands for (see `rows`)."""
    if isinstance(arg, np.ndarray) and arg.ndim == 2:
        return [int(row[0]) for row in arg]
    return arg if isinstance(arg, str | int) else type(arg).__name__


@dataclass
class ScriptedEngine:
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def record(*args: Any) -> None:
            self.calls.append((name, *[_shown(arg) for arg in args]))

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

    def __init__(self, num_tokens: int, num_sources: int = 1, params: SamplingParams | None = None) -> None:
        self.engine = ScriptedEngine()
        self.fetches: list[ScriptedFetch] = []
        self.request = Request("r#1", list(range(num_tokens)), params or SamplingParams())
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


# --- hidden states of the whole prompt, for its log-probabilities -----------------------------------------------------

SCORING = SamplingParams(prompt_logprobs=0)


def rows(start: int, end: int) -> bytes:
    """Hidden states of the tokens start .. end - 1."""
    return np.array([[token, 0, 0, 0] for token in range(start, end)], np.float32).tobytes()


def added(start: int, end: int) -> tuple[Any, ...]:
    return ("add_prompt_hidden", "r#1", start, list(range(start, end)))


def test_all_hidden_states_are_asked_for_and_handed_on_in_order() -> None:
    scene = Scene(40, params=SCORING)
    assert scene.fetch.request.hidden == "all"
    scene.admission.reserved(0, blocks_for(40))
    for start, end in ((0, 16), (16, 17), (17, 40)):
        scene.fetch.listener.hidden(rows(start, end))
    scene.fetch.listener.ended(num_complete_blocks=3, error=None)
    assert scene.commands() == [added(0, 16), added(16, 17), added(17, 40), ("adopt", "r#1", 40)]


def test_hidden_states_wait_for_the_reservation_in_order() -> None:
    scene = Scene(40, params=SCORING)
    scene.fetch.listener.hidden(rows(0, 16))
    scene.fetch.listener.hidden(rows(16, 32))
    assert scene.commands() == []
    scene.admission.reserved(0, blocks_for(40))
    scene.fetch.listener.hidden(rows(32, 40))
    assert scene.commands() == [added(0, 16), added(16, 32), added(32, 40)]


def test_a_prompt_of_one_token_needs_its_last_hidden_state_only() -> None:
    assert Scene(1, params=SCORING).fetch.request.hidden == "last"


@pytest.mark.parametrize("is_reserved", [True, False])
def test_the_next_source_sends_all_hidden_states_anew(is_reserved: bool) -> None:
    scene = Scene(100, num_sources=2, params=SCORING)
    if is_reserved:
        scene.admission.reserved(0, blocks_for(100))
    scene.fetch.listener.hidden(rows(0, 48))
    scene.fetch.listener.ended(num_complete_blocks=3 if is_reserved else 0, error="peer silent")
    assert (len(scene.fetches), scene.fetch.request.hidden, len(scene.fetch.request.tokens)) == (2, "all", 100)
    scene.fetch.listener.hidden(rows(0, 64))
    if not is_reserved:
        scene.admission.reserved(0, blocks_for(100))
    scene.fetch.listener.hidden(rows(64, 100))
    old = [added(0, 48)] if is_reserved else []
    assert scene.commands() == [*old, added(0, 64), added(64, 100)]
    assert scene.fetch.grants == [(3, [103, 104, 105, 106]) if is_reserved else (0, [*range(100, 107)])]


def test_a_source_lost_after_all_hidden_states_is_followed_for_blocks_only() -> None:
    scene = Scene(40, num_sources=2, params=SCORING)
    scene.fetch.listener.hidden(rows(0, 40))
    scene.fetch.listener.ended(num_complete_blocks=0, error="peer silent")
    assert scene.fetch.request.hidden == "none"
    scene.admission.reserved(0, blocks_for(40))
    assert scene.commands() == [added(0, 40)], "they are kept"


def test_the_last_source_lost_halfway_leaves_the_rest_to_the_engine() -> None:
    scene = Scene(100, params=SCORING)
    scene.admission.reserved(0, blocks_for(100))
    scene.fetch.listener.hidden(rows(0, 40))
    scene.fetch.listener.ended(num_complete_blocks=4, error="peer silent")
    assert scene.commands() == [added(0, 40), ("adopt", "r#1", 64)]


def test_a_revoked_fetch_begins_anew_with_its_hidden_states() -> None:
    scene = Scene(40, params=SCORING)
    scene.admission.reserved(0, blocks_for(40))
    scene.fetch.listener.hidden(rows(0, 16))
    scene.admission.revoked()
    scene.fetch.listener.ended(num_complete_blocks=1, error="cancelled")
    scene.admission.reserved(0, blocks_for(40))
    scene.fetch.listener.hidden(rows(0, 40))
    assert scene.commands() == [added(0, 16), ("release_reservation", "r#1"), added(0, 40)]


@pytest.mark.parametrize(
    "payload",
    [b"", b"123", rows(0, 3)[:-4], rows(0, 31)],
    ids=["nothing", "no row", "not a multiple of a row", "more than there are tokens left"],
)
@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_payload_that_cannot_be_ends_that_fetch_only(payload: bytes, num_sources: int) -> None:
    scene = Scene(40, num_sources=num_sources, params=SCORING)
    scene.admission.reserved(0, blocks_for(40))
    first = scene.fetch
    first.listener.hidden(rows(0, 10))
    first.listener.hidden(payload)
    assert first.is_cancelled
    first.listener.hidden(rows(20, 40))  # was on its way: whose place in the prompt would be a guess
    assert scene.commands() == [added(0, 10)]
    first.listener.ended(num_complete_blocks=1, error="cancelled")
    if num_sources == 1:
        assert scene.commands() == [added(0, 10), ("adopt", "r#1", 16)]
        return
    scene.fetch.listener.hidden(rows(0, 40))
    scene.fetch.listener.ended(num_complete_blocks=3, error=None)
    assert scene.commands() == [added(0, 10), added(0, 40), ("adopt", "r#1", 40)]


@pytest.mark.parametrize("payload", [b"", ROW.tobytes() * 2, ROW.tobytes()[:-1]])
def test_a_single_hidden_state_of_the_wrong_size_ends_its_fetch(payload: bytes) -> None:
    scene = Scene(40)
    scene.admission.reserved(0, blocks_for(40))
    scene.fetch.listener.hidden(payload)
    assert scene.fetch.is_cancelled
    scene.fetch.listener.ended(num_complete_blocks=0, error="cancelled")
    assert scene.commands() == [("adopt", "r#1", 0)]


def test_hidden_states_after_the_end_are_dropped() -> None:
    scene = Scene(40, params=SCORING)
    scene.admission.reserved(0, blocks_for(40))
    scene.admission.end()
    scene.fetch.listener.hidden(rows(0, 40))
    assert scene.commands() == []
