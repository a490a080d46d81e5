"""The fields that say what an answer must match: OpenAI's response_format, vLLM's structured_outputs and guided_*.

They are ways to say one thing, so that at most one of them may be there. Whether a grammar is one, the decode node
finds out, which compiles it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from common.structured_output import MAX_CHOICES, Kind, StructuredOutput
from proxy.strict_model import StrictModel

_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


class JsonSchemaFormat(StrictModel):
    """strict changes nothing: the schema is always held."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = True


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have json_schema with type json_schema, and only with it")
        return self


def _check_json(schema: object) -> object:
    if not isinstance(schema, dict | str):
        raise ValueError("must be a JSON schema, as an object or a string")
    return schema


def _check_choice(choices: object) -> object:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"has {len(choices)} choices, must have from 1 to {MAX_CHOICES}")
    return choices


class StructuredOutputsBody(StrictModel):
    json_: Annotated[Any, Field(alias="json")] = None
    regex: str | None = None
    choice: Any = None
    grammar: str | None = None
    json_object: bool = False

    _json = field_validator("json_", mode="before")(_check_json)
    _choice = field_validator("choice", mode="before")(_check_choice)

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputsBody:
        if len(self.asked) != 1:
            raise ValueError(f"has {len(self.asked) or 'none'} of {', '.join(_KINDS)}, must have one")
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """What the answer must match, by its key."""
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = {name: value for name, value in values.items() if value is not None}
        return {**found, "json_object": True} if self.json_object else found


class StructuredFields(StrictModel):
    """guided_*: vLLM's older names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None

    _json = field_validator("guided_json", mode="before")(_check_json)
    _choice = field_validator("guided_choice", mode="before")(_check_choice)

    @model_validator(mode="after")
    def _check_structured_output(self) -> StructuredFields:
        if len(asked := self._asked()) > 1:
            raise ValueError(f"{' and '.join(found.field for found in asked)} exclude each other, one may be given")
        return self

    @property
    def structured_output(self) -> StructuredOutput | None:
        return next(iter(self._asked()), None)

    def _asked(self) -> list[StructuredOutput]:
        """Raises ValueError for one that is too long."""
        found: list[StructuredOutput] = []
        if self.response_format is not None and self.response_format.type == "json_object":
            found.append(StructuredOutput("json_object", field="response_format"))
        if self.response_format is not None and (wanted := self.response_format.json_schema) is not None:
            found.append(_make("json", wanted.schema_, "response_format.json_schema.schema"))
        if self.structured_outputs is not None:
            asked = self.structured_outputs.asked.items()
            found += [_make(name, value, f"structured_outputs.{name}") for name, value in asked]
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        found += [_make(name, value, f"guided_{name}") for name, value in guided.items() if value is not None]
        return found


def _make(name: str, value: Any, field: str) -> StructuredOutput:
    if name == "json_object":
        return StructuredOutput("json_object", field=field)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return StructuredOutput(_KINDS[name], text, field)
