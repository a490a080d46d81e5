"""What several areas share: transformers' greedy outputs of the real model, and how outputs are held against them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TIE = 2e-3  # log-probabilities closer than this may change places between two orders of summation


@dataclass(frozen=True)
class Case:
    """One prompt and what transformers' greedy decoding in float32 made of it."""

    name: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    steps: list[list[float]]

    def check(self, output_token_ids: list[int]) -> None:
        """Equal to the reference, or different from a step on where the two best tokens tie within rounding.

        At such a tie the runner-up is right too (its log-probability is the best's within TIE); what follows it is
        another text and is not compared.
        """
        for index, (mine, right) in enumerate(zip(output_token_ids, self.output_token_ids, strict=False)):
            if mine == right:
                continue
            _, best, second_id, second = self.steps[index]
            assert mine == second_id, f"{self.name}: output {index} is {mine}, must be {right}"
            assert best - second < TIE, (
                f"{self.name}: output {index} is {mine}, must be {right} (margin {best - second})"
            )
            return
        assert len(output_token_ids) == len(self.output_token_ids), f"{self.name}: {len(output_token_ids)} outputs"


def load_cases() -> dict[str, Case]:
    found = json.loads((Path(__file__).parent / "reference" / "greedy_reference.json").read_text())
    return {name: Case(name, **fields) for name, fields in found.items()}


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """See reference/make_reference.py."""
    return load_cases()


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Commands that a test calls set up logging for a process of their own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
