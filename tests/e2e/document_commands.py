"""The commands that the documents hold: found, told from mere mentions, and moved off the ports that they name.

Reads Markdown (fenced blocks and code in the text) and the comments of the compose files. Runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "deploy/**/*.md", "compose*.yaml")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # history: what it says held when it was written
)
LANGUAGES = {"bash", "console", "python", "yaml"}

_FENCED = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = "tandem|make|curl|python|pip|docker|git"
_INLINE = re.compile(rf"`((?:[A-Z_]+=\S+\s+)*(?:{_PROGRAMS})(?:\s+[^`]+)?)`")
_PLACEHOLDER = re.compile(r"(?<!-X)\s[A-Z]{4,}(?!\S)|\.\.\.|\|")


@dataclass(frozen=True)
class Block:
    document: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}-{self.language}-{self.number}"

    @property
    def commands(self) -> list[str]:
        if self.language == "bash":
            return _joined(self.text.splitlines())
        return [command for command, _ in self.session] if self.language == "console" else []

    @property
    def session(self) -> list[tuple[str, list[str]]]:
        """Of a console: each command behind a `$`, with the lines that are shown as its output."""
        return [_command_and_output(part) for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]]


def blocks_of(document: str, *languages: str) -> list[Block]:
    """Those of these languages, or all that say theirs; the others are pictures."""
    found = enumerate(_FENCED.findall((ROOT / document).read_text()))
    return [Block(document, number, name, text) for number, (name, text) in found if name in languages or not languages]


def all_blocks() -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks_of(document) if block.language]


def inline_code(document: str) -> Iterator[str]:
    """Commands and mentions of commands within the text; those of a compose file stand in its comments."""
    text = (ROOT / document).read_text()
    if document.endswith(".yaml"):
        yield from re.findall(r"^# {3,}(docker .*)$", text, re.MULTILINE)
        text = "\n".join(re.findall(r"^ *# ?(.*)$", text, re.MULTILINE))
    for span in _INLINE.findall(_FENCED.sub("", text)):
        yield " ".join(span.split())


def is_mention(code: str) -> bool:
    """Whether it names a command (`tandem serve`) or its form (`tandem steps FILE`) instead of being one to type."""
    program, *rest = code.split()
    return _PLACEHOLDER.search(code) is not None or not rest or (program == "tandem" and len(rest) == 1)


def inline_commands() -> dict[str, str]:
    """Each command to type that stands within a text and in no block, with the document where it stands."""
    in_blocks = {command for block in all_blocks() for command in block.commands}
    found = {code: name for name in DOCUMENTS for code in inline_code(name) if not is_mention(code)}
    return {code: name for code, name in found.items() if code not in in_blocks}


def all_commands() -> set[str]:
    return {command for block in all_blocks() for command in block.commands} | set(inline_commands())


def on_ports(command: str, ports: dict[str, int]) -> str:
    """The same command on other ports: those that it names, and 8000 where it leaves that out."""
    port = ports["8000"]
    for number, other in ports.items():
        command = re.sub(rf"\b{number}\b", str(other), command)
    if command == "make serve":
        return f'make serve ARGS="--port {port}"'
    if re.match(r"tandem serve\b", command) and "--port" not in command:
        return f"{command} --port {port}"
    if re.match(r"tandem (chat|status)\b", command) and "--url" not in command:
        return f"{command} --url http://127.0.0.1:{port}"
    return command


def shown_as(lines: Iterable[str]) -> re.Pattern[str]:
    """Matches an output that holds these lines in this order; `...` stands for whatever is left out."""
    parts = [re.escape(line).replace(re.escape("..."), "[^\n]*") for line in lines if line not in ("", "...")]
    return re.compile("".join(rf"^{part}$[\s\S]*" for part in parts), re.MULTILINE)


def _joined(lines: list[str]) -> list[str]:
    """Lines that end in a backslash go on; comments and spaces for looks are dropped."""
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    bare = (re.sub(r"(^|\s)#\s.*$", "", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in bare if line.strip()]


def _command_and_output(part: str) -> tuple[str, list[str]]:
    lines = part.splitlines()
    end = 1 + next(number for number, line in enumerate(lines) if not line.endswith("\\"))
    [command] = _joined(lines[:end])
    return command, lines[end:]
