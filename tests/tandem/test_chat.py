"""`tandem chat` against a scripted server: from a pipe, in a terminal, and what it says when something is wrong."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tandem.cli import main
from tandem.endpoint import base_url
from tests.tandem.scripted_endpoint import Script, ScriptedEndpoint, running_endpoint

Ask = Callable[..., tuple[int, str, str]]
UNUSED = "http://127.0.0.1:1"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEndpoint]:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    with running_endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def ask(endpoint: ScriptedEndpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Lines in by a pipe; exit status, standard output and standard error."""

    def ask(lines: str, *flags: str, url: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = main(["chat", "--url", url or endpoint.url, *flags])
        return status, *capsys.readouterr()

    return ask


def test_each_line_of_a_pipe_is_a_question_of_one_conversation(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    endpoint.answers += [Script(["Pa", "ris", "."], num_tokens=3), Script(["Rome"])]
    status, out, err = ask("Capital of France?\n\nAnd of Italy?", url=f"{endpoint.url}/v1/")
    assert (status, out) == (0, "Paris.\nRome\n")
    first, second = err.splitlines()
    assert re.fullmatch(r"TTFT \d\.\d\d s, 3 tokens(, [\d.]+ tokens/s)?", first)
    assert re.fullmatch(r"TTFT \d\.\d\d s, ~1 tokens", second)
    assert endpoint.messages(1) == [
        ("user", "Capital of France?"),
        ("assistant", "Paris."),
        ("user", "And of Italy?"),
    ]
    assert endpoint.asked[0]["model"] == "tiny"
    assert endpoint.asked[0]["stream_options"] == {"include_usage": True}
    assert "temperature" not in endpoint.asked[0]


def test_commands(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    endpoint.answers += [Script(["a"]), Script(["b"]), Script(["c"])]
    status, out, err = ask("1\n/reset\n2\n/system Be brief. \n3\n/help\n/exit\n4\n", "--system", "Be kind.")
    assert (status, out) == (0, "a\nb\nc\n")
    assert endpoint.messages(0) == [("system", "Be kind."), ("user", "1")]
    assert endpoint.messages(1) == [("system", "Be kind."), ("user", "2")]
    assert endpoint.messages(2) == [("system", "Be brief."), ("user", "3")]
    assert all(f"/{name}" in err for name in ("reset", "system TEXT", "help", "exit"))


def test_a_command_that_does_not_exist_is_not_sent(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    status, out, err = ask("/rset\n")
    assert (status, out) == (1, "")
    assert err == "tandem chat: there is no command /rset, did you mean /reset?\n"
    assert not endpoint.asked


def test_flags_reach_the_server(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    endpoint.answers.append(Script(["x"], finish_reason="length"))
    endpoint.key = "k"
    flags = ["--temperature", "0", "--top-p", "0.5", "--max-tokens", "7", "--seed", "1", "--model", "large"]
    status, _, err = ask("hi\n", *flags, "--api-key", "k")
    assert status == 0
    assert "cut off: the limit of tokens is reached" in err
    body = endpoint.asked[0]
    assert [body[name] for name in ("temperature", "top_p", "max_tokens", "seed", "model")] == [0, 0.5, 7, 1, "large"]


def test_the_key_may_come_from_the_environment(
    endpoint: ScriptedEndpoint, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.key = "k"
    endpoint.answers.append(Script(["x"]))
    monkeypatch.setenv("TANDEM_API_KEY", "k")
    assert ask("hi\n")[:2] == (0, "x\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "asks for an API key: give it as TANDEM_API_KEY or with --api-key"),
        (["--api-key", "wrong"], "asks for an API key; the one that was given is not the right one: give it"),
    ],
)
def test_a_missing_key_is_one_clear_line(endpoint: ScriptedEndpoint, ask: Ask, flags: list[str], message: str) -> None:
    endpoint.key = "k"
    _check_refused(ask("hi\n", *flags), message)


def test_no_server_and_no_such_model_are_one_clear_line(endpoint: ScriptedEndpoint, ask: Ask) -> None:
    _check_refused(ask("hi\n", url=UNUSED), f"no server answers at {UNUSED} (Connection refused); start one with")
    _check_refused(ask("hi\n", "--model", "huge"), "has no model 'huge', it has tiny, large")
    _check_refused(ask("hi\n", url="ftp://a"), "--url is 'ftp://a', must look like http://127.0.0.1:8000")
    for url in ("http://a:b", "http://[::1", "http://", "http:", "http:/host", "https:x", "http://a?b", "http://a#b"):
        _check_refused(ask("hi\n", url=url), f"--url is {url!r}, must look like")
    endpoint.models = []
    _check_refused(ask("hi\n"), "names no model; give one with --model")
    assert not endpoint.asked


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            Script(status=400, body=b'{"error": {"message": "the prompt has 9 tokens,\\n at most 8 go"}}'),
            "9 tokens, at",
        ),
        (Script(status=404, body=b'{"detail": "Not Found"}'), "Not Found"),
        (Script(status=502, body=b"<html>"), "/v1/chat/completions answers with status 502 Bad Gateway"),
        (Script(["x"], error={"message": "all nodes are gone"}), "all nodes are gone"),
        (Script(["x"], error={"code": 1}), "broke off the answer without saying why"),
        (Script(["x"], finish_reason=None), "the server ended the answer before it was complete"),
        (Script(body=b"data: nonsense\n\n"), "streams something that is no JSON: 'nonsense'"),
    ],
)
def test_a_failed_answer_is_one_clear_line(endpoint: ScriptedEndpoint, ask: Ask, script: Script, message: str) -> None:
    endpoint.answers.append(script)
    _check_refused(ask("hi\nnever asked\n"), message)
    assert len(endpoint.asked) == 1


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
def test_a_line_that_is_no_text_is_one_clear_line(endpoint: ScriptedEndpoint, encoding: str) -> None:
    endpoint.answers += [Script(["a"]), Script(["b"])]
    run = [sys.executable, "-m", "tandem", "chat", "--url", endpoint.url]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for line in (b"caf\xe9\n", b"/system caf\xe9\n"):
        asked = subprocess.run(run, input=b"hi\n" + line + b"ho\n", capture_output=True, env=environment, check=False)
        assert (asked.returncode, len(endpoint.asked)) == (1, 1)
        assert asked.stderr.splitlines()[1:] == [b"tandem chat: a line is no UTF-8 text, so it is not sent"]
        endpoint.asked.clear()
    for flag in ("--system", "--model"):
        asked = subprocess.run([*run, flag, b"caf\xe9"], capture_output=True, env=environment, check=False)
        assert asked.stderr == f"tandem chat: {flag} is no UTF-8 text (see --help)\n".encode()


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("host:80", "http://host:80"),
        ("http:80", "http://http:80"),
        (" https://a/v1/ ", "https://a"),
        ("http://[::1]:8/x/v1", "http://[::1]:8/x"),
    ],
)
def test_urls_that_are_understood(url: str, base: str) -> None:
    assert base_url(url) == base


def _check_refused(result: tuple[int, str, str], message: str) -> None:
    status, _, err = result
    assert status == 1
    assert err.startswith("tandem chat: ")
    assert message in err
    assert err.count("\n") == 1


# --- in a terminal --------------------------------------------------------------------------------------------------


class Terminal:
    """`tandem chat` in a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self._master, terminal = pty.openpty()
        command = [sys.executable, "-m", "tandem", "chat", "--url", url]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, preexec_fn=_own_terminal
        )
        os.close(terminal)
        self._seen = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        """What came up to and with `text`, since the last call."""
        deadline = time.monotonic() + 30
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} did not come, but {self._seen!r}"
            self._seen += os.read(self._master, 65536).decode()
        found, _, self._seen = self._seen.partition(text)
        return found + text

    def leave(self) -> int:
        """Ctrl-C until it ends: readline misses one that comes between its prompt and its waiting for a key."""
        deadline = time.monotonic() + 30
        while True:
            self.send("\x03")
            try:
                return self.process.wait(2)
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, "Ctrl-C does not end it"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def _own_terminal() -> None:
    """So that Ctrl-C typed there reaches the process."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(endpoint: ScriptedEndpoint) -> Iterator[Terminal]:
    terminal = Terminal(endpoint.url)
    try:
        yield terminal
    finally:
        terminal.close()


def test_in_a_terminal_ctrl_c_stops_an_answer_and_then_leaves(endpoint: ScriptedEndpoint, terminal: Terminal) -> None:
    endpoint.answers += [
        Script(["one\x1b[31m ", "two\x07"], holds=True),
        Script(status=400, body=b'{"error": {"message": "not this"}}'),
        Script(["three"], num_tokens=1),
    ]
    assert "\x1b[2mtiny at " in terminal.until("> ")
    terminal.send("go\n")
    answer = terminal.until("two")
    assert "\x1b[31m" not in answer
    assert "[31m two" in answer  # the text, without what would have coloured the terminal
    terminal.send("\x03")
    assert "\x07" not in terminal.until("\x1b[2mstopped; TTFT ")
    terminal.until("> ")
    terminal.send("bad\n")
    terminal.until("tandem chat: not this")
    terminal.until("> ")
    terminal.send("again\n")
    terminal.until("three")
    terminal.until("> ")
    assert terminal.leave() == 0
    # the stopped answer is part of the conversation, the refused question is not
    assert endpoint.messages(2) == [("user", "go"), ("assistant", "one\x1b[31m two\x07"), ("user", "again")]
