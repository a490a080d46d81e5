"""How the rows of one flat batch attend: plain numbers, made once a step and read by every layer.

Row i of the batch is token i of the step; a sequence's rows stand together and are the last of its positions. What an
implementation derives from a plan it keeps in it (`once`), so that all layers share it. Knows no model and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionShape:
    """dtype: of the pool; scores and probabilities are float32 whatever it is."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """All arrays are int32 and contiguous.

    first_rows: [S + 1], sequence s has rows first_rows[s] .. first_rows[s + 1] - 1.
    contexts: [S], positions that a sequence's last row attends, its own included.
    first_blocks: [S + 1], block_ids: sequence s has blocks block_ids[first_blocks[s] : first_blocks[s + 1]].
    write_blocks, write_offsets: [N], block and slot that each row's K and V are written to.
    """

    shape: AttentionShape
    first_rows: np.ndarray
    contexts: np.ndarray
    first_blocks: np.ndarray
    block_ids: np.ndarray
    write_blocks: np.ndarray
    write_offsets: np.ndarray
    _made: dict[Callable[[AttentionPlan], Any], Any] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.write_blocks)

    def once(self, make: Callable[[AttentionPlan], T]) -> T:
        """make(self), at the first call with this function; what it returned then at every later one."""
        found: T | None = self._made.get(make)
        if found is None:
            found = self._made[make] = make(self)
        return found


def make_plan(
    shape: AttentionShape,
    query_lens: Sequence[int],
    contexts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    write_blocks: np.ndarray,
    write_offsets: np.ndarray,
) -> AttentionPlan:
    """query_lens: rows of each request, in batch order. block_tables: at least ceil(context / block_size) block ids of
    each request. write_blocks, write_offsets: [N], any integer type; copied."""
    num_blocks = [-(-context // shape.block_size) for context in contexts]
    used = [table[:count] for table, count in zip(block_tables, num_blocks, strict=True)]
    return AttentionPlan(
        shape,
        first_rows=_starts(query_lens),
        contexts=np.array(contexts, np.int32),
        first_blocks=_starts(num_blocks),
        block_ids=np.fromiter(chain.from_iterable(used), np.int32, sum(num_blocks)),
        write_blocks=np.array(write_blocks, np.int32),
        write_offsets=np.array(write_offsets, np.int32),
    )


def _starts(counts: Sequence[int]) -> np.ndarray:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
