"""`tandem chat`: a conversation in the terminal with any OpenAI endpoint, streamed.

    read a line -> a /command, or a question -> stream the answer -> one line of timings -> read a line ...

Ctrl-C stops an answer, at the prompt it leaves. From a pipe each line is a question: answers go to standard output,
all else to standard error. Text of a model never reaches a terminal's control.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from common.argument_parser import Parser, did_you_mean
from common.errors import PeerError, TandemError
from tandem.endpoint import Endpoint, add_endpoint_flags

_COMMANDS = {
    "/reset": "forget the conversation (the system message stays)",
    "/system TEXT": "set the system message and begin anew; without TEXT: none",
    "/help": "this list",
    "/exit": "leave (or Ctrl-D)",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 when the person or the input ended it, 1 when a server did."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    for flag, text in (("--system", arguments.system), ("--model", arguments.model)):
        if text is not None and not _is_unicode(text):
            parser.error(f"{flag} is no UTF-8 text")
    try:
        endpoint = Endpoint(arguments.url, arguments.api_key)
        model = asyncio.run(_model_of(endpoint, arguments.model))
    except TandemError as error:
        print(f"tandem chat: {error.message}", file=sys.stderr)
        return 1
    options = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    options = {name: value for name, value in options.items() if value is not None}
    return Chat(endpoint, model, options, Conversation(arguments.system), Screen()).run()


async def _model_of(endpoint: Endpoint, name: str | None) -> str:
    """The one that was asked for, else the server's first."""
    async with endpoint:
        known = await endpoint.models()
    if name is not None and known and name not in known:
        raise PeerError(f"{endpoint.url} has no model {name!r}, it has {', '.join(known)}")
    if name is None and not known:
        raise PeerError(f"{endpoint.url} names no model; give one with --model")
    return name or known[0]


@dataclass
class Conversation:
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def reset(self) -> None:
        self.turns.clear()


@dataclass
class Answer:
    """What has come of one answer, and when (monotonic seconds)."""

    asked: float
    text: str = ""
    first: float | None = None
    last: float | None = None
    num_pieces: int = 0
    num_tokens: int | None = None
    finish_reason: str | None = None

    def add(self, event: dict[str, Any]) -> str:
        """The text that an event adds."""
        if usage := event.get("usage"):
            self.num_tokens = usage.get("completion_tokens")
        choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        piece = (choice.get("delta") or {}).get("content") or ""
        if piece:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.num_pieces += 1
            self.text += piece
        return str(piece)

    def timings(self) -> str:
        """TTFT, tokens, tokens a second after the first. Without the server's count each event counts as a token."""
        if self.first is None or self.last is None:
            return "no text"
        exact = self.num_tokens is not None
        count = self.num_tokens if self.num_tokens is not None else self.num_pieces
        parts = [f"TTFT {self.first - self.asked:.2f} s", f"{'' if exact else '~'}{count} tokens"]
        if count > 1 and self.last > self.first:
            parts.append(f"{(count - 1) / (self.last - self.first):.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("cut off: the limit of tokens is reached")
        return ", ".join(parts)


class Screen:
    """Answers to standard output, everything about them to standard error; a prompt and dim lines on terminals only."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):  # wrong bytes come through, so that their line can be refused
            sys.stdin.reconfigure(errors="surrogateescape")
        if self.is_interactive:
            import readline  # noqa: F401  # gives input() line editing and this conversation's history

    def lines(self) -> Iterator[str]:
        if not self.is_interactive:
            yield from (line.rstrip("\n") for line in sys.stdin)
            return
        with suppress(EOFError):
            while True:
                yield input("> ")

    def write(self, text: str) -> None:
        print(_CONTROL.sub("", text) if sys.stdout.isatty() else text, end="", flush=True)

    def note(self, text: str) -> None:
        print(_dimmed(text, sys.stderr), file=sys.stderr, flush=True)

    def error(self, message: str) -> None:
        print(f"tandem chat: {_CONTROL.sub('', message)}", file=sys.stderr, flush=True)


class Chat:
    def __init__(
        self, endpoint: Endpoint, model: str, options: dict[str, Any], conversation: Conversation, screen: Screen
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._options = options
        self._conversation = conversation
        self._screen = screen

    def run(self) -> int:
        if self._screen.is_interactive:
            self._screen.note(f"{self._model} at {self._endpoint.url}; /help lists the commands, Ctrl-D leaves")
        try:
            for line in self._screen.lines():
                text = line.strip()
                if text == "/exit":
                    break
                is_good = self._obey(text)
                if not is_good and not self._screen.is_interactive:
                    return 1
        except KeyboardInterrupt:  # at the prompt: enough
            self._screen.write("\n")
            return 0 if self._screen.is_interactive else 130
        return 0

    def _obey(self, text: str) -> bool:
        """False for a line that came to nothing."""
        if not _is_unicode(text):
            self._screen.error("a line is no UTF-8 text, so it is not sent")
            return False
        return self._command(text) if text.startswith("/") else self._ask(text)

    def _command(self, text: str) -> bool:
        """False for one that does not exist."""
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self._conversation.reset()
            self._screen.note("the conversation begins anew")
        elif name == "/system":
            self._conversation.system = rest.strip() or None
            self._conversation.reset()
            self._screen.note("the system message is set" if rest.strip() else "there is no system message now")
        elif name == "/help":
            self._screen.note("\n".join(f"{command:<14} {what}" for command, what in _COMMANDS.items()))
        else:
            hint = did_you_mean(name, [command.split()[0] for command in _COMMANDS])
            self._screen.error(f"there is no command {name}{hint or '; /help lists them'}")
            return False
        return True

    def _ask(self, text: str) -> bool:
        """False when the server gave no answer; then the question is as if it had not been asked."""
        if not text:
            return True
        turns = self._conversation.turns
        turns.append({"role": "user", "content": text})
        answer = Answer(time.monotonic())
        how = ""
        try:
            asyncio.run(self._stream(answer))
        except KeyboardInterrupt:
            if not self._screen.is_interactive:
                raise
            how = "stopped; "
        except TandemError as error:
            turns.pop()
            self._screen.write("\n" if answer.text else "")
            self._screen.error(error.message)
            return False
        if answer.text:
            turns.append({"role": "assistant", "content": answer.text})
        else:
            turns.pop()
        self._screen.write("\n")
        self._screen.note(how + answer.timings())
        return True

    async def _stream(self, answer: Answer) -> None:
        body = {
            "model": self._model,
            "messages": self._conversation.messages,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        async with self._endpoint, aclosing(self._endpoint.stream("/v1/chat/completions", body)) as events:
            async for event in events:
                self._screen.write(answer.add(event))
        if answer.finish_reason is None:
            raise PeerError("the server ended the answer before it was complete")


def _is_unicode(text: str) -> bool:
    """False when bytes of it were none of its encoding, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dimmed(text: str, stream: TextIO) -> str:
    return f"{_DIM}{text}{_PLAIN}" if stream.isatty() else text


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem chat",
        usage="%(prog)s [FLAGS]",
        description="A conversation in the terminal with any OpenAI endpoint, streamed; timings below each answer.",
        epilog=f"Commands: {', '.join(_COMMANDS)}. Ctrl-C stops an answer, at the prompt it leaves. From a pipe each "
        "line is a question of one conversation: echo 'What is the capital of France?' | tandem chat",
    )
    add_endpoint_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="model to ask (default: the server's first)")
    parser.add_argument("--system", metavar="TEXT", help="system message that the conversation begins with")
    parser.add_argument("--temperature", metavar="N", type=float, help="0 takes the most likely token each time")
    parser.add_argument("--top-p", metavar="N", type=float, help="draw only from the most likely tokens of this sum")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="longest answer")
    parser.add_argument("--seed", metavar="N", type=int, help="the same answer each time")
    return parser
