"""The fields that say how many answers a prompt gets and how they are found: n, best_of, beam search; prompt_logprobs.

`n` answers to each prompt are returned, `num_generated` are made, and `num_sequences` run at once on a node. Ranges
that SamplingParams has are checked there.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import field_validator, model_validator

from common.sampling_params import BeamSearchParams
from proxy.structured_schema import StructuredFields

MAX_N = 128
MAX_SEQUENCES = 1024  # of all prompts of a request together


class ChoiceFields(StructuredFields):
    """beam_width: best_of or n if it is not given. Without beam search its three fields may only ask for nothing."""

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: Any = False
    prompt_logprobs: int | None = None
    stream: bool = False

    @field_validator("n", "best_of")
    @classmethod
    def _check_count(cls, count: int | None) -> int | None:
        if count is not None and not 1 <= count <= MAX_N:
            raise ValueError(f"is {count}, must be from 1 to {MAX_N}")
        return count

    @field_validator("early_stopping", mode="before")
    @classmethod
    def _check_early_stopping(cls, value: object) -> object:
        if not (isinstance(value, bool) or value == "never"):
            raise ValueError('must be true, false or "never"')
        return value

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, must be at least n ({self.n})")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs must be absent with stream true")
        if self.use_beam_search:
            self._check_beam_width()
        else:
            self._check_no_beams()
        return self

    def _check_beam_width(self) -> None:
        width = self.num_sequences
        if width < self.n:
            raise ValueError(f"beam_width is {width}, must be at least n ({self.n})")
        if self.best_of not in (None, width):
            raise ValueError(f"best_of is {self.best_of}, must be absent or beam_width ({width}), its newer name")

    def _check_no_beams(self) -> None:
        if self.stream and self.num_generated > self.n:
            raise ValueError(
                f"best_of is {self.best_of}, must be n ({self.n}) with stream true, the best are known last"
            )
        neutral = {"beam_width": (None, self.num_generated), "length_penalty": (1,), "early_stopping": (False,)}
        for name, values in neutral.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name} is {value}, which needs use_beam_search true")

    @property
    def num_generated(self) -> int:
        """Choices of a prompt that a node makes: more than n if the best of them are to be chosen here."""
        return self.n if self.use_beam_search else self.best_of or self.n

    @property
    def num_sequences(self) -> int:
        """Sequences of a prompt that run at once."""
        if self.use_beam_search and self.beam_width is not None:
            return self.beam_width
        return self.best_of or self.n

    @property
    def sequences_field(self) -> str:
        """The field that num_sequences comes from."""
        if self.use_beam_search and self.beam_width is not None:
            return "beam_width"
        return "best_of" if self.best_of is not None else "n"

    @property
    def beam_search(self) -> BeamSearchParams | None:
        """Raises ValueError naming the field, its value and the range."""
        if not self.use_beam_search:
            return None
        return BeamSearchParams(
            width=self.num_sequences, length_penalty=self.length_penalty, early_stopping=self.early_stopping
        )
