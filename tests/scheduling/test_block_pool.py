"""Block pool: eviction order, and a state machine over everything it offers."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import ConfigError
from common.scheduling.block_pool import BlockPool


def test_the_null_block_is_never_allocated():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_a_pool_needs_two_blocks():
    with pytest.raises(ConfigError, match="has 1 blocks"):
        BlockPool(1)


def test_never_hashed_blocks_go_before_reusable_ones():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    pool.register(blocks[0], b"0")
    pool.register(blocks[2], b"2")
    pool.free(blocks)
    assert set(pool.allocate(2)) == {blocks[1], blocks[3]}
    assert pool.find(b"0") == blocks[0]
    assert pool.find(b"2") == blocks[2]


def test_the_tail_of_a_chain_is_evicted_first_and_older_chains_before_newer_ones():
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for block_id in (*new, *old):
        pool.register(block_id, b"%d" % block_id)
    pool.free(old)
    pool.free(new)
    assert [pool.allocate(1) for _ in range(4)] == [[old[1]], [old[0]], [new[1]], [new[0]]]
    assert pool.num_cached == 0


def test_a_hit_makes_a_block_recent_again():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.free([first])
    pool.free([second])
    pool.pin([first])
    pool.free([first])
    assert pool.allocate(1) == [second]


def test_a_second_block_with_the_same_hash_stays_unknown():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    assert pool.register(first, b"same")
    assert not pool.register(second, b"same")
    pool.free([second])
    pool.free([first])
    assert pool.allocate(1) == [second]
    assert pool.find(b"same") == first


class PoolMachine(RuleBasedStateMachine):
    """Model: for each block how many use it, for each hash the block that has it."""

    NUM_BLOCKS = 7

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.users: list[list[int]] = []
        self.hashes: dict[bytes, int] = {}

    @property
    def counts(self):
        counts: dict[int, int] = {}
        for blocks in self.users:
            for block_id in blocks:
                counts[block_id] = counts.get(block_id, 0) + 1
        return counts

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        if count > self.pool.num_free:
            return
        blocks = self.pool.allocate(count)
        assert not set(blocks) & set(self.counts)
        self.hashes = {h: b for h, b in self.hashes.items() if b not in blocks}
        self.users.append(blocks)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.users.pop(data.draw(st.integers(0, len(self.users) - 1))))

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def hit(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.hashes)), min_size=1, max_size=3, unique=True))
        blocks = [self.pool.find(block_hash) for block_hash in chosen]
        assert blocks == [self.hashes[block_hash] for block_hash in chosen]
        self.pool.pin(blocks)
        self.users.append(blocks)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), number=st.integers(0, 20))
    def register(self, data, number):
        block_id = data.draw(st.sampled_from(data.draw(st.sampled_from(self.users))))
        block_hash = b"%d" % number
        is_new = block_hash not in self.hashes and block_id not in self.hashes.values()
        assert self.pool.register(block_id, block_hash) == is_new
        if is_new:
            self.hashes[block_hash] = block_id

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.hashes.clear()

    @invariant()
    def books_agree(self):
        counts = self.counts
        self.pool.check_integrity(counts)
        assert self.pool.num_free + len(counts) == self.NUM_BLOCKS - 1
        assert self.pool.num_used == len(counts)
        assert self.pool.num_cached == len(self.hashes)
        for block_hash, block_id in self.hashes.items():
            assert self.pool.find(block_hash) == block_id


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
