"""Plain torch kernels: the oracle for every other backend, and what serves where there is none."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from kernels.plan import AttentionPlan, OneSequence, RowsTogether


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation: pairs are (i, i + head_dim / 2)."""
    rotary_dim = 2 * cos.shape[-1]
    first, second, rest = x.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def write_kv(k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, layer: int, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
    view = pool[:, layer]
    view[blocks, 0, :, offsets] = k.to(pool.dtype)
    view[blocks, 1, :, offsets] = v.to(pool.dtype)


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    pool.index_copy_(0, destinations, pool.index_select(0, sources))


def paged_attention(
    q: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    out = torch.empty_like(q)
    table = pool.view(-1, pool.shape[-2] * pool.shape[-1])
    shift = layer * 2 * plan.shape.num_kv_heads
    for sequence in plan.one_by_one:
        rows = slice(sequence.first_row, sequence.first_row + sequence.num_rows)
        out[rows] = _attend_sequence(q[rows], table, shift, sequence, plan.shape.num_kv_heads, scale, plan.scratch)
    if plan.together is not None:
        attended = _attend_together(q.index_select(0, plan.together.rows), table, shift, plan.together, plan, scale)
        out.index_copy_(0, plan.together.rows, attended)
    return out


def _attend_sequence(
    q: torch.Tensor,
    table: torch.Tensor,
    shift: int,
    sequence: OneSequence,
    num_kv_heads: int,
    scale: float,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """q: [num_rows, num_heads, head_dim] of one request."""
    num_rows, num_heads, head_dim = q.shape
    kv = _gather(table, sequence.kv_rows + shift, scratch).view(2, num_kv_heads, -1, head_dim)
    k, v = kv[:, :, : sequence.context].unbind(0)
    if num_rows == 1:
        scores = torch.bmm(q.view(num_kv_heads, -1, head_dim), k.transpose(1, 2)).mul_(scale)
        return torch.bmm(scores.softmax(-1), v).view(1, num_heads, head_dim)
    mask = _causal_mask(num_rows, sequence.context, q)
    heads = q.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(heads, k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _causal_mask(num_rows: int, context: int, like: torch.Tensor) -> torch.Tensor:
    """[num_rows, context], -inf where a row must not look: the last row sees all, each one above it one less."""
    return torch.full((num_rows, context), float("-inf"), dtype=like.dtype).triu_(context - num_rows + 1)


def _attend_together(
    q: torch.Tensor, table: torch.Tensor, shift: int, rows: RowsTogether, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """One row for each of R requests, block by block, then joined: softmax over a request's blocks by segments.

    q: [R, num_heads, head_dim]. No padding: a request costs its own blocks.
    """
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads, block_size = plan.shape.num_kv_heads, plan.shape.block_size
    num_blocks = len(rows.segment)
    kv = _gather(table, rows.kv_rows + shift, plan.scratch).view(2, num_blocks, num_kv_heads, block_size, head_dim)
    k, v = kv.unbind(0)
    _clear_tails(v, rows)
    q_of_block = q.view(num_requests, -1).index_select(0, rows.segment).view(num_blocks * num_kv_heads, -1, head_dim)
    scores = torch.bmm(q_of_block, k.view(-1, block_size, head_dim).transpose(1, 2)).mul_(scale)
    scores = scores.view(num_blocks, num_heads, block_size).masked_fill_(rows.tail_mask, float("-inf"))
    highest = torch.segment_reduce(scores.amax(-1), "max", lengths=rows.lengths, axis=0, unsafe=True)
    weights = scores.sub_(highest.index_select(0, rows.segment).unsqueeze(-1)).exp_()
    total = q.new_zeros(num_requests, num_heads).index_add_(0, rows.segment, weights.sum(-1))
    of_block = torch.bmm(weights.view(num_blocks * num_kv_heads, -1, block_size), v.view(-1, block_size, head_dim))
    out = q.new_zeros(num_requests, num_heads * head_dim).index_add_(0, rows.segment, of_block.view(num_blocks, -1))
    return out.view(num_requests, num_heads, head_dim).div_(total.unsqueeze(-1))


def _gather(table: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Rows of the pool in the step's own scratch memory: fresh memory for each layer costs more than the copy."""
    out = scratch[: rows.numel() * table.shape[1]].view(rows.numel(), table.shape[1])
    return torch.index_select(table, 0, rows, out=out)


def _clear_tails(v: torch.Tensor, rows: RowsTogether) -> None:
    """Zeroes slots past the end: their weight is 0, but 0 times what an earlier owner left there may be NaN."""
    last = v.index_select(0, rows.last)
    tail = rows.tail_mask.index_select(0, rows.last).unsqueeze(-1)
    v.index_copy_(0, rows.last, last.masked_fill_(tail, 0.0))
