"""The benchmark's own arithmetic: lengths, step counts, contiguous books, the trace, marks against targets."""

import statistics

import pytest

from benchmarks.engine_batching import heavy_tailed_lengths, num_continuous_steps, num_static_steps
from benchmarks.engine_memory import book_contiguous, book_paged
from benchmarks.engine_report import Check, format_table
from benchmarks.engine_swap import Costs, describe_crossover
from benchmarks.engine_trace import MAX_MODEL_LEN, TOKENS_PER_HASH, TraceRequest, load_trace, share_repeated
from common.kv_layout import KVLayout


def test_static_waits_for_the_longest_and_continuous_fills_the_first_free_place():
    lengths = [5, 1, 1, 3, 2, 2]
    assert num_static_steps(lengths, 2) == 5 + 3 + 2
    assert num_continuous_steps(lengths, 2) == 7  # 5 + 2 in one place, 1 + 1 + 3 + 2 in the other
    assert num_continuous_steps(lengths, 6) == num_static_steps(lengths, 6) == 5


def test_heavy_tailed_lengths_keep_mean_and_tail():
    lengths = heavy_tailed_lengths(128, 18.0, 1.3)
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert statistics.mean(lengths) == pytest.approx(18.0, rel=0.1)
    assert statistics.pstdev(lengths) / statistics.mean(lengths) > 1.3


def test_the_trace_fits_the_context_and_its_ids_cover_each_prompt():
    requests = load_trace(2000)
    assert len(requests) == 2000
    for request in requests:
        assert 0 < request.num_in + request.num_out <= MAX_MODEL_LEN
        assert -(-request.num_in // TOKENS_PER_HASH) == len(request.hash_ids)


def test_prompts_are_equal_as_far_as_their_ids_are():
    first = TraceRequest(70, 1, (4, 9, 2)).prompt_token_ids()
    second = TraceRequest(96, 1, (4, 9, 3)).prompt_token_ids()
    assert (len(first), len(second)) == (70, 96)
    assert first[:64] == second[:64]
    assert set(first[64:]).isdisjoint(second[64:])


def test_share_repeated_counts_tokens_of_ids_seen_before():
    assert share_repeated([TraceRequest(64, 1, (1, 2)), TraceRequest(40, 1, (1, 3))]) == 32 / 104


def test_contiguous_books_by_hand():
    """Room for two reservations of 10: steps 1 and 2 run two, the third request waits for the first to end."""
    requests = [TraceRequest(4, 2, ()), TraceRequest(4, 3, ()), TraceRequest(4, 1, ())]
    usage = book_contiguous(requests, lambda request: 10, 20)
    assert usage.num_steps == 3
    assert usage.num_running == [2, 2]
    # After step 1 the two hold 4 filled slots each; after step 2 one has left, the other holds 5.
    assert usage.waste == [12 / 20, 5 / 10]


def test_paging_wastes_less_than_a_block_for_each_request():
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=8, dtype="float32", model_fingerprint="test")
    requests = [TraceRequest(40 + i, 5, (2 * i, 2 * i + 1)) for i in range(20)]
    paged = book_paged(requests, layout, 512, enable_prefix_caching=False)
    contiguous = book_contiguous(requests, lambda request: 128, 512)
    assert paged.mean_running > 2 * contiguous.mean_running
    assert max(paged.waste) < 8 / 40
    assert paged.hit_rate == 0


@pytest.mark.parametrize(("value", "is_limit", "is_met"), [(2.0, False, True), (1.9, False, False), (2.0, True, False)])
def test_a_check_says_whether_its_target_is_met(value, is_limit, is_met):
    check = Check("ratio", value, 2.0, "x", is_limit=is_limit)
    assert check.is_met is is_met
    assert str(check).startswith("PASS" if is_met else "FAIL")


def test_tables_line_up():
    assert format_table(["name", "n"], [["a", "10"], ["longer", "7"]]) == ["name     n", "a       10", "longer   7"]


@pytest.mark.parametrize(
    ("swap", "recompute", "word"),
    [((1, 1), (2, 2), "every length from 64"), ((3, 3), (2, 2), "up to 256"), ((3, 1), (2, 2), "at 256 tokens")],
)
def test_the_crossover_is_told(swap, recompute, word):
    pairs = zip((64, 256), swap, recompute, strict=True)
    found = [Costs(num_tokens, a, a, b, a, b, prefers_swap=a < b) for num_tokens, a, b in pairs]
    assert word in describe_crossover(found)
