"""Paged attention of a flat mixed batch: against dense attention in float64, and bit for bit whatever the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import ops
from kernels.types import AttentionOptions
from tests.kernels.attention_scene import KV_DTYPES, LAYER, Form, Scene, make_sequence
from tests.kernels.conftest import UseKernels

forms = st.builds(
    Form,
    kv_heads=st.integers(1, 3),
    group=st.one_of(st.integers(1, 8), st.just(40)),  # 40: more heads than a job of the compiled kernels has rows
    head_dim=st.sampled_from([8, 16, 18, 32, 64, 72, 80, 96, 100, 128, 160, 256]),
    dtype=st.sampled_from(KV_DTYPES),
    window=st.sampled_from([0, 0, 1, 7, 32, 50]),
    soft_cap=st.sampled_from([0.0, 0.0, 1.5, 30.0]),
)
lengths = st.one_of(st.integers(1, 70), st.sampled_from([8, 16, 31, 32, 33, 64, 65]))
batches = st.lists(st.tuples(lengths, st.one_of(st.just(0), lengths)), max_size=5)  # rows, tokens before them
any_kernels = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_against_dense(form: Form, batch: list[tuple[int, int]], block_size: int, seed: int) -> None:
    sequences = [make_sequence(form, rows + before, seed + i) for i, (rows, before) in enumerate(batch)]
    scene = Scene(form, sequences, block_size, seed)
    rows = [(count, count + before) for count, before in batch]
    torch.testing.assert_close(scene.attend(rows).double(), scene.dense(rows), rtol=1e-4, atol=1e-5)


@settings(any_kernels, max_examples=25)
@given(form=forms, batch=batches, block_size=st.sampled_from([8, 16, 32]), seed=st.integers(0, 2**31))
def test_equals_dense_attention_and_reads_no_slot_that_is_nobodys(
    kernels: UseKernels, form: Form, batch: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    check_against_dense(form, batch, block_size, seed)


@pytest.mark.slow
@settings(any_kernels, max_examples=1000)
@given(form=forms, batch=batches, block_size=st.sampled_from([8, 16, 32]), seed=st.integers(0, 2**31))
def test_equals_dense_attention_over_many_shapes(
    kernels: UseKernels, form: Form, batch: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    check_against_dense(form, batch, block_size, seed)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("before", [0, 15, 16, 100])
def test_chunks_around_the_edges_of_tiles(kernels: UseKernels, before: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 10, 11, 31, 32, 33, 64, 65):
        check_against_dense(Form(dtype=dtype), [(rows, before), (1, 7)], 16, rows)


def test_large_scores_do_not_overflow(kernels: UseKernels) -> None:
    sequence = make_sequence(Form(), 50, 1)
    sequence.q.mul_(200)
    scene = Scene(Form(), [sequence])
    torch.testing.assert_close(scene.attend([(50, 50)]).double(), scene.dense([(50, 50)]), rtol=1e-3, atol=1e-4)


# --- a row's result depends on nothing but the row ------------------------------------------------------------------

INVARIANT_FORMS = [
    *(Form(dtype=dtype) for dtype in KV_DTYPES),
    Form(group=1, head_dim=64, window=20),
    Form(group=5, head_dim=100, soft_cap=20.0, dtype=torch.bfloat16),
    Form(kv_heads=1, group=40, head_dim=72, window=33),
]
CONTEXT = 75


@pytest.fixture(params=range(len(INVARIANT_FORMS)))
def form(request: pytest.FixtureRequest) -> Form:
    return INVARIANT_FORMS[request.param]


def test_chunks_of_any_size_give_the_same_bits(native_kernels: UseKernels, form: Form) -> None:
    scene = Scene(form, [make_sequence(form, CONTEXT, 3)])
    whole = scene.attend([(CONTEXT, CONTEXT)])
    for size in (1, 2, 3, 7, 16, 31, 32, 33, 64):
        ends = [min(start + size, CONTEXT) for start in range(0, CONTEXT, size)]
        counts = [end - start for start, end in zip(range(0, CONTEXT, size), ends, strict=True)]
        pieces = [scene.attend([piece]) for piece in zip(counts, ends, strict=True)]
        assert torch.equal(torch.cat(pieces), whole), f"chunks of {size}"


def test_other_sequences_beside_it_change_no_bit(native_kernels: UseKernels, form: Form) -> None:
    mine, others = make_sequence(form, CONTEXT, 3), [make_sequence(form, length, length) for length in (1, 17, 40)]
    alone = Scene(form, [mine]).attend([(20, CONTEXT)])
    for place in range(4):
        sequences = [*others[:place], mine, *others[place:]]
        rows = [(20, CONTEXT) if s is mine else (min(5, len(s.q)), len(s.q)) for s in sequences]
        first = sum(count for count, _ in rows[:place])
        assert torch.equal(Scene(form, sequences, seed=place).attend(rows)[first : first + 20], alone)


def test_blocks_and_their_size_change_no_bit(native_kernels: UseKernels, form: Form) -> None:
    mine = make_sequence(form, CONTEXT, 3)
    found = [Scene(form, [mine], size, seed).attend([(CONTEXT, CONTEXT)]) for size in (8, 16, 32) for seed in range(2)]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_threads_change_no_bit(native_kernels: UseKernels, form: Form) -> None:
    scene = Scene(form, [make_sequence(form, CONTEXT, 3), make_sequence(form, 9, 4)])
    found = []
    for num_threads in (1, 2, 3):
        native_kernels(num_threads)
        found.append(scene.attend([(CONTEXT, CONTEXT), (1, 9)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_write_kv_touches_its_slots_of_its_layer_only(kernels: UseKernels, dtype: torch.dtype) -> None:
    form = Form(dtype=dtype, head_dim=18)
    sequence = make_sequence(form, 21, 5)
    scene = Scene(form, [sequence, make_sequence(form, 40, 6)])
    scene.pool.view(torch.uint8).fill_(7)
    before = scene.pool.clone()
    qkv = torch.cat((sequence.k[3:5], sequence.v[3:5]), 1)  # rows stand apart, as in the model's product
    scene.tables = scene.tables[:1]
    ops.write_kv(qkv[:, :2], qkv[:, 2:], scene.pool, LAYER, scene.plan([(2, 5)]), form.scales())
    block, right = scene.tables[0][0], before.clone()
    for which, x in enumerate((sequence.k, sequence.v)):
        scales = form.scales()
        if scales is not None:
            x = x * (1 / (scales.key, scales.value)[which][LAYER])[:, None]
        stored = x.round().clamp(-127, 127) if dtype == torch.int8 else x.clamp(-448, 448)
        right[block, LAYER, which, :, 3:5] = stored[3:5].to(dtype).transpose(0, 1)
    assert torch.equal(scene.pool.view(torch.uint8), right.view(torch.uint8))
    assert not torch.equal(scene.pool.view(torch.uint8), before.view(torch.uint8))


def test_half_precision_queries_get_their_dtype_back(kernels: UseKernels) -> None:
    scene = Scene(Form(dtype=torch.bfloat16), [make_sequence(Form(), 20, 1)])
    rows = [(3, 20)]
    query, plan = scene.query(rows).bfloat16(), scene.plan(rows)
    out = ops.paged_attention(query, scene.pool, LAYER, plan, scene.form.options)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), scene.dense(rows), rtol=2e-2, atol=2e-2)


def test_shapes_that_do_not_fit_are_refused(kernels: UseKernels) -> None:
    scene = Scene(Form(), [make_sequence(Form(), 8, 1)])
    query, plan = scene.query([(3, 8)]), scene.plan([(3, 8)])
    with pytest.raises(ValueError, match="paged_attention: shapes do not fit"):
        ops.paged_attention(query[:2], scene.pool, 0, plan, AttentionOptions(1.0))
    with pytest.raises(ValueError, match="write_kv: shapes do not fit"):
        ops.write_kv(query, query, scene.pool, 0, plan)


def test_heads_larger_than_the_compiled_kernels_have_are_refused(native_kernels: UseKernels) -> None:
    with pytest.raises(ValueError, match="head_dim is 264, the compiled kernels have up to 256"):
        Scene(Form(head_dim=264), [make_sequence(Form(head_dim=264), 3, 1)])
