"""What every layer of a forward pass sees of a step: one flat batch. Built by the runner, read by the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.plan import AttentionPlan


@dataclass(frozen=True)
class FlatBatch:
    """N rows, one for each token of the step.

    token_ids, positions: int64 [N]. plan: where each row's K and V go, and what it attends.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: AttentionPlan
