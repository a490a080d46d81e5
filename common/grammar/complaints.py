"""What the library (llguidance) has against a grammar, in a line for whoever wrote it.

The library quotes the text, its own wrapper around it, and arrows below both; what is wrong is one line of that. Knows
the library's forms of complaint, and passes on what has none of them.
"""

from __future__ import annotations

import re
from typing import Final

from common.structured_output import Kind

_MAX_LENGTH = 480  # some complaints quote the grammar
_MAX_QUOTED = 40

_CANNOT: Final[dict[Kind, str]] = {
    "json_schema": "this JSON schema cannot be used",
    "json_object": "a JSON object cannot be asked for",
    "regex": "this regular expression cannot be used",
    "choice": "these choices cannot be used",
    "grammar": "this grammar cannot be used",
}
_IN_OTHER_WORDS: Final = {
    "NoExtensionBias": "no token may follow",
    "Expecting object schema to apply options": "it is no JSON object",
    "Failed to convert the grammar from GBNF to Lark: ": "read as GBNF (Lark has a rule `start:`): ",
    "lookarounds not supported yet": r"look-around and \b are not supported",
}
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_WRAPPED_REGEX = re.compile(r'invalid regex ".*?" \(in regex\): ', re.DOTALL)
_PARSED_REGEX = re.compile(
    r"regex parse error:\n    (?P<text>.*)\n    (?P<arrows>[ ^]*\^)\n(?:.*\n)*?error: (?P<error>.*)"
)
_INTERNALS_OF_REGEX = re.compile(r"(; \w+)? in regex /.*")


def refusal(kind: Kind, complaint: str) -> str:
    """That a grammar of this kind cannot be used, and why, on one line."""
    return f"{_CANNOT[kind]}: {essential(complaint, with_place=kind != 'regex')}"


def essential(complaint: str, *, with_place: bool = True) -> str:
    """The line that says what is wrong. with_place: and where in the text, if it is said; the text of a regular
    expression stands in a grammar that only the library has seen."""
    place = _PLACE.match(complaint)
    text = complaint[place.end() :] if place else complaint
    where = f"line {place[1]}, column {place[2]}: " if place and with_place else ""
    text = _WRAPPED_REGEX.sub("", text, count=1)
    if found := _PARSED_REGEX.search(text):
        return f"{where}{found['error']}: {_marked(found)}"
    lines = [line for line in text.removesuffix("<non-verbose/>").splitlines() if line.strip()]
    line = _INTERNALS_OF_REGEX.sub("", lines[0]) if lines else "it gives no reason"
    for theirs, ours in _IN_OTHER_WORDS.items():
        line = line.replace(theirs, ours)
    return f"{where}{line}"[:_MAX_LENGTH].strip()


def _marked(found: re.Match[str]) -> str:
    """The part of a regular expression that the arrows point at, the last one if there are several."""
    arrows = found["arrows"]
    first = arrows.rfind(" ") + 1
    return f"'{found['text'][first : len(arrows)][:_MAX_QUOTED]}' at character {first + 1}"
