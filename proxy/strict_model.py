"""What all bodies of the API have in common: how strictly their fields are read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


class StrictModel(BaseModel):
    """Strict types (no "1" for 1), no NaN; nulls are dropped before anything is checked."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data
