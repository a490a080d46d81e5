"""KV cache manager: copy-on-write, admission, and a state machine with forks, growth and sharing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kv_layout import KVLayout
from common.request import Request
from common.scheduling.kv_cache_manager import KVCacheManager

BLOCK_SIZE = 8


def make_cache(num_blocks, block_size=BLOCK_SIZE, num_host_blocks=0):
    layout = KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32", model_fingerprint="test"
    )
    return KVCacheManager(layout, num_blocks, num_host_blocks=num_host_blocks)


def test_admission_is_all_or_nothing():
    cache = make_cache(4)
    assert cache.admit(Request("a", range(9)), 9) == 0
    assert cache.admit(Request("b", range(100, 109)), 9) is None
    assert not cache.has_table("b")
    assert cache.num_free_blocks == 1


def test_unreferenced_hits_count_as_blocks_that_are_taken():
    cache = make_cache(4)
    first = Request("a", range(24))
    cache.admit(first, 24)
    cache.mark_filled(first, 24)
    cache.free("a")
    again = Request("b", [*range(24), 99])
    assert cache.admit(again, 25) is None  # three hits and one new, three exist
    cache.check_integrity()
    assert cache.admit(Request("c", range(24)), 24) == 24


def test_spare_blocks_stay_free():
    cache = make_cache(4)
    assert cache.admit(Request("a", range(9)), 9, num_spare_blocks=2) is None
    assert cache.admit(Request("a", range(9)), 9, num_spare_blocks=1) == 0


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_forked_partial_block_is_copied_by_the_first_writer_only(block_size):
    cache = make_cache(8, block_size)
    parent, child = Request("p", range(block_size + 3)), Request("c", range(block_size + 3))
    cache.admit(parent, parent.num_tokens)
    cache.mark_filled(parent, parent.num_tokens)
    cache.fork(parent, child)
    shared = list(cache.block_ids("p"))
    start = parent.num_tokens
    assert cache.num_missing_blocks([("c", start, start + 1)]) == 1
    copies = cache.prepare_write("c", start, start + 1)
    assert copies == ((shared[1], cache.block_ids("c")[1]),)
    assert cache.block_ids("c")[0] == shared[0]
    assert cache.prepare_write("p", start, start + 1) == ()  # now its own
    cache.check_integrity()
    cache.free("p")
    cache.free("c")
    assert cache.pool.num_used == 0


def test_missing_blocks_of_several_writers_are_what_their_writes_take():
    """The last owner of a shared block writes in place; but while somebody only reads it, every writer needs a copy."""
    cache = make_cache(20)
    parent = Request("p", range(12))
    cache.admit(parent, 12)
    cache.mark_filled(parent, 12)
    for name in "abc":
        cache.fork(parent, Request(name, range(12)))
    writes = [(name, 12, 13) for name in "abc"]
    assert cache.num_missing_blocks(writes) == 3
    cache.free("p")
    num_missing = cache.num_missing_blocks(writes)
    before = cache.num_free_blocks
    for write in writes:
        assert cache.prepare_write(*write) is not None
    assert before - cache.num_free_blocks == num_missing == 2
    cache.check_integrity()


def test_no_room_to_copy_changes_nothing():
    cache = make_cache(3)
    parent, child = Request("p", range(11)), Request("c", range(11))
    cache.admit(parent, 11)
    cache.fork(parent, child)
    before = list(cache.block_ids("c"))
    assert cache.prepare_write("c", 11, 12) is None
    assert list(cache.block_ids("c")) == before
    cache.check_integrity()


def test_integrity_notices_a_leak():
    cache = make_cache(4)
    cache.admit(Request("a", range(9)), 9)
    cache.pool.pin([cache.block_ids("a")[0]])
    with pytest.raises(AssertionError, match="2 references, 1 users"):
        cache.check_integrity()
    with pytest.raises(AssertionError, match="3 references, 2 in tables"):
        cache.check_counts()


class CacheMachine(RuleBasedStateMachine):
    """Every slot of a shadow memory holds the tokens up to it; no operation may show a request another's."""

    NUM_BLOCKS = 10

    def __init__(self):
        super().__init__()
        self.cache = make_cache(self.NUM_BLOCKS, num_host_blocks=6)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.host_memory: dict[int, tuple[int, ...]] = {}
        self.requests: dict[str, Request] = {}
        self.swapped: dict[str, Request] = {}
        self.number = 0

    def new_request(self, tokens):
        self.number += 1
        return Request(f"r{self.number}", tokens)

    def write(self, request, start, end):
        table = self.cache.block_ids(request.request_id)
        for position in range(start, end):
            block_id = table[position // BLOCK_SIZE]
            assert self.cache.pool.ref_count(block_id) == 1, "a shared block is written"
            slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
            self.memory[slot] = tuple(request.all_token_ids[: position + 1])
        request.num_computed_tokens = max(request.num_computed_tokens, end)
        self.cache.mark_filled(request, end)

    def copy(self, pairs, source, target):
        for from_block, to_block in pairs:
            for offset in range(BLOCK_SIZE):
                target[to_block * BLOCK_SIZE + offset] = source.get(from_block * BLOCK_SIZE + offset, ())

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=34))
    def admit(self, tokens):
        tokens = sorted(tokens)  # many equal prefixes
        request = self.new_request(tokens)
        num_cached = self.cache.admit(request, len(tokens))
        if num_cached is None:
            return
        self.requests[request.request_id] = request
        request.num_computed_tokens = num_cached
        self.write(request, num_cached, len(tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 2), count=st.integers(1, 10))
    def append(self, data, token, count):
        request = data.draw(st.sampled_from(list(self.requests.values())))
        start = request.num_tokens
        num_missing = self.cache.num_missing_blocks([(request.request_id, start, start + count)])
        fits = num_missing <= self.cache.num_free_blocks
        copies = self.cache.prepare_write(request.request_id, start, start + count)
        assert fits == (copies is not None)
        if copies is None:
            return
        self.copy(copies, self.memory, self.memory)
        for _ in range(count):
            request.append_output(token)
        self.write(request, start, start + count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(list(self.requests.values())))
        child = self.new_request(parent.all_token_ids)
        child.num_computed_tokens = parent.num_computed_tokens
        self.cache.fork(parent, child)
        self.requests[child.request_id] = child

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data):
        request_id = data.draw(st.sampled_from(list(self.requests)))
        self.cache.free(request_id)
        del self.requests[request_id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def swap_out(self, data):
        request_id = data.draw(st.sampled_from(list(self.requests)))
        copies = self.cache.swap_out(request_id)
        if copies is not None:
            self.copy(copies, self.memory, self.host_memory)
            self.swapped[request_id] = self.requests.pop(request_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        request_id = data.draw(st.sampled_from(list(self.swapped)))
        request = self.swapped[request_id]
        copies = self.cache.swap_in(request, request.num_tokens)
        if copies is not None:
            self.copy(copies, self.host_memory, self.memory)
            self.requests[request_id] = self.swapped.pop(request_id)
            assert self.cache.num_filled_tokens(request_id) >= request.num_computed_tokens

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def free_swapped(self, data):
        request_id = data.draw(st.sampled_from(list(self.swapped)))
        self.cache.free(request_id)
        del self.swapped[request_id]

    @rule()
    def reset(self):
        self.cache.reset_prefix_cache()

    @invariant()
    def everybody_reads_its_own_tokens(self):
        for request in self.requests.values():
            table = self.cache.block_ids(request.request_id)
            for position in range(request.num_computed_tokens):
                slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                assert self.memory[slot] == tuple(request.all_token_ids[: position + 1])

    @invariant()
    def books_agree(self):
        self.cache.check_integrity()
        self.cache.check_counts()

    def teardown(self):
        for request_id in (*self.requests, *self.swapped):
            self.cache.free(request_id)
        assert self.cache.swap_space.num_free == 6
        assert self.cache.pool.num_used == 0
        self.cache.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
