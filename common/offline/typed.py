"""Values of any type, as a Python program gives them, checked against the types that a dataclass names.

Strict: True is no number and 1 no boolean. Values of numpy and torch count as Python's. Knows no field and no range.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from common.errors import InvalidRequestError

STRICT = ConfigDict(strict=True, revalidate_instances="always")
"""Of a dataclass that `typed` checks: its own fields are checked again, they may have been set to anything."""

_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "True or False",
    "string_type": "a text",
    "is_instance_of": "a list",
    "sequence_str": "a list",
    "dict_type": "a dict",
}
_PLAIN = frozenset({int, float, bool, str, bytes, bytearray, type(None)})
_KEY = "[key]"  # pydantic's mark of an error in a dict's key

_T = TypeVar("_T")


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's, whatever holds several values in order (or none) as a list."""
    if type(value) in _PLAIN:  # most values, and there may be many
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray):
        return [plain(item) for item in value]
    return value


def typed(adapter: TypeAdapter[_T], value: _T) -> _T:
    """A copy. Raises InvalidRequestError naming the field, its value and what it must be."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
    of_field = [detail for detail in details if detail["loc"][0] == details[0]["loc"][0]]
    places = [_place(value, detail["loc"]) for detail in of_field]
    depth = max(map(len, places))  # of a union's members, the one that was meant fails farthest inside
    place, detail = next(pair for pair in zip(places, of_field, strict=True) if len(pair[0]) == depth)
    wanted = dict.fromkeys(_wanted(other) for at, other in zip(places, of_field, strict=True) if at == place)
    verb = "has the key" if detail["loc"][-1] == _KEY else "is"
    name = "".join(place).removeprefix(".")
    text = f"{name} {verb} {detail['input']!r:.80}, must be {' or '.join(wanted)}"
    raise InvalidRequestError(text, param=str(detail["loc"][0]))


def _wanted(detail: ErrorDetails) -> str:
    return _WORDS.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")


def _place(value: Any, loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The steps to the wrong value as Python writes them, without pydantic's names of a union's members."""
    steps = []
    for part in loc[:-2] if loc[-1] == _KEY else loc:
        if is_dataclass(value):
            value = getattr(value, str(part))
            steps.append(f".{part}")
            continue
        with suppress(LookupError, TypeError):  # the name of a union's member is no index
            value = value[part]
            steps.append(f"[{part!r}]")
    return tuple(steps)
