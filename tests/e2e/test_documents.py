"""Every command in the documents is run as it is written, or covered by a stage or test that is named here.

What is changed is mechanical: ports become free ones, a path that stands for a model of yours becomes a real one, a
question is typed where one is waited for. Blocks run in the fast suite where they are cheap or on the first screen.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import free_port
from common.checkpoints.resolve import resolve_model
from decode_node.config import DecodeConfig
from proxy.config import ProxyConfig
from tandem.cli import _COMMANDS as TANDEM_COMMANDS
from tandem.cli import main
from tests.e2e.document_commands import (
    DOCUMENTS,
    LANGUAGES,
    ROOT,
    Block,
    all_blocks,
    all_commands,
    blocks_of,
    inline_code,
    inline_commands,
    shown_as,
)
from tests.e2e.document_terminal import Terminal, kind_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COMPOSE_TEST = "tests/deploy/live_compose.py"
ELSEWHERE = {
    "git clone": (".ci/run", "make install-dev"),  # a clean checkout is what it works on
    "make test": (".ci/run", "make test\n"),
    "make test ARGS=tests/scheduling": (".ci/run", "make test\n"),
    "make test-long": (".ci/run", "make test-long\n"),
    "make test-compose": (".ci/run", "make test-compose\n"),
    "make lint": (".ci/run", "make lint\n"),
    "docker compose up": (COMPOSE_TEST, "def test_comes_up_with_one_command"),
    "docker compose up --detach --scale prefill=2 --scale decode=3": (COMPOSE_TEST, "def test_scales_up_beside"),
    "TANDEM_MODELS_DIR=./models TANDEM_MODEL=/models/NAME docker compose up": (
        COMPOSE_TEST,
        "def test_serves_a_model_of_a_folder_of_yours",
    ),
    "docker compose -f compose.yaml -f compose.gpu.yaml up --build": (
        COMPOSE_TEST,
        "def test_the_file_for_a_gpu_host_is_valid",
    ),
    "docker compose exec proxy tandem status": (COMPOSE_TEST, "def test_comes_up_with_one_command"),
    "docker compose exec decode tandem env": ("tests/tandem/test_environment.py", "def test_"),  # the GPU host's
}
"""Commands that the test suite cannot run, each with the file that covers it and what must stand there."""

FAST = {"README.md"}
"""Documents whose blocks all run in the fast suite, but for those that call make."""

NO_UNKNOWN_EXTRA = r"\A(?![\s\S]*does not provide)[\s\S]*Would install tandem-serve"
SHORTENED = {
    "tandem chat": "tandem chat --temperature 0 --max-tokens 32",  # a drawn answer may go on and on
    "python -m benchmarks.kernels": "python -m benchmarks.kernels --only small",  # the others may miss a target
    "python -m benchmarks.sampling": "python -m benchmarks.sampling --quick",
    "python -m benchmarks.serve": "python -m benchmarks.serve --rounds 1",
    "python -m benchmarks.step": "python -m benchmarks.step --rounds 1",
    "make bench-engine": 'make bench-engine ARGS="--only memory --rounds 1"',
}
"""What ends sooner, or surely, in the place of a command."""

TYPED = {"tandem chat": "What is the capital of France?\n"}
PRINTED = {
    "tandem chat": r"Paris[\s\S]*\d tokens/s",
    "tandem status --watch": r"decode +[\w-]+ +joined",
    "tandem models": r"smollm2-135m-instruct .* ready",
    "tandem config decode --max-num-seqs 8": r"max_num_seqs: 8 +# --max-num-seqs",
    "tandem config decode --config tandem.yaml": r"max_num_seqs: 16 +# \S*tandem.yaml:\d",
    "tandem env": r"torch +\d",
    "tandem steps steps.decode.jsonl": r"outputs[\s\S]*steps\.decode\.png",
    **dict.fromkeys(("pip install '.[all]'", "pip install '.[proxy]'"), NO_UNKNOWN_EXTRA),
    "curl -X POST http://127.0.0.1:8000/reset_prefix_cache": r'"num_nodes":2',
    "curl http://127.0.0.1:8000/ready": r'"status":"ready"',
}
"""The essential of what a command prints, where the document does not show it."""

Open = Callable[..., Terminal]


def file_name(block: Block) -> str:
    """A config file says in its first line how it is called."""
    return block.text.partition("\n")[0].removeprefix("# ")


def _marks(block: Block) -> list[pytest.MarkDecorator]:
    calls_make = any(command.startswith("make ") for command in block.commands)
    return [] if block.document in FAST and not calls_make else [pytest.mark.slow]


def _params(*languages: str) -> list[Any]:
    found = [block for block in all_blocks() if block.language in languages]
    found = [block for block in found if not block.commands or not set(block.commands) <= set(ELSEWHERE)]
    return [pytest.param(block, id=str(block), marks=_marks(block)) for block in found]


# --- nothing is left out ----------------------------------------------------------------------------------------------


def test_every_block_is_of_a_language_that_is_run() -> None:
    assert {str(block) for block in all_blocks() if block.language not in LANGUAGES} == set()
    assert {block.document for block in all_blocks()} >= {"README.md", "CONTRIBUTING.md", "docs/getting-started.md"}


def test_what_is_covered_elsewhere_still_stands_in_a_document_and_is_covered() -> None:
    assert set(ELSEWHERE) - all_commands() == set()
    for command, (file, text) in ELSEWHERE.items():
        assert text in (ROOT / file).read_text(), f"{file} does not cover {command!r}: no {text!r} there"


def test_what_is_typed_and_expected_still_stands_in_a_document() -> None:
    assert {*TYPED, *PRINTED, *SHORTENED} - all_commands() == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_a_text_mentions_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, name, *_ in ([*code.split(), ""] for code in inline_code(document)):
        names = {"tandem": set(TANDEM_COMMANDS), "make": targets}.get(program, {name})
        assert name in {*names, "COMMAND", ""}, f"{document}: {program} {name}"


def test_defaults_that_the_tuning_page_names_are_those_of_the_code() -> None:
    fields = {**ProxyConfig.model_fields, **DecodeConfig.model_fields}
    named = re.findall(r"`--([a-z-]+)` \((\d[\d.]*)", (ROOT / "docs" / "tuning.md").read_text())
    assert len(named) >= 5
    assert [(flag, text) for flag, text in named if fields[flag.replace("-", "_")].default != float(text)] == []


# --- they are run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def open_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """On a service that runs already, or on free ports for one that the commands start themselves."""
    with ExitStack() as stack:

        def make(*, starts_service: bool = False, folder: Path = tmp_path, source: Path = ROOT) -> Terminal:
            port = free_port() if starts_service else request.getfixturevalue("split").service.port
            ports = {"8000": port, "8100": free_port(), "9000": port}
            model = str(resolve_model("smollm2-135m-instruct"))
            replaced = {"/models/my-llama": model, **SHORTENED}
            return stack.enter_context(Terminal(folder, ports, replaced, source=source))

        yield make


def _run(terminal: Terminal, command: str) -> str:
    output = terminal.run(command, TYPED.get(command, ""))
    assert re.search(PRINTED.get(command, ""), output), f"{command} printed:\n{output}"
    return output


@pytest.mark.parametrize("block", _params("bash"))
def test_commands_run(block: Block, open_terminal: Open, request: pytest.FixtureRequest) -> None:
    commands = [command for command in block.commands if command not in ELSEWHERE]
    starts_service = any(kind.answers or kind.stays for kind in map(kind_of, commands) if kind)
    if all(command.startswith(("make ", "pip ")) for command in commands):
        checkout = request.getfixturevalue("checkout")
        terminal = open_terminal(starts_service=True, folder=checkout, source=checkout)
    else:
        terminal = open_terminal(starts_service=starts_service)
    for config in blocks_of(block.document, "yaml"):
        (terminal.folder / file_name(config)).write_text(config.text)
    for command in commands:
        _run(terminal, command)
    terminal.close_service()


@pytest.mark.parametrize("block", _params("console"))
def test_a_session_prints_what_is_shown(block: Block, open_terminal: Open) -> None:
    terminal = open_terminal()
    for command, lines in block.session:
        output = terminal.run(command)
        assert shown_as(lines).search(output), output


@pytest.mark.parametrize("block", _params("python"))
def test_programs_run(block: Block, open_terminal: Open) -> None:
    asks_a_server = "127.0.0.1:8000" in block.text
    output = open_terminal(starts_service=not asks_a_server).run_python(block.text)
    for prompt in re.findall(r"\[\"(The sky is)\"", block.text):
        assert prompt in output
    assert output.strip()


@pytest.mark.parametrize("block", _params("yaml"))
def test_config_files_are_taken(block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / file_name(block)
    path.write_text(block.text)
    for command in ("serve", "proxy", "prefill", "decode"):
        assert main(["config", command, "--config", str(path)]) == 0
        assert f"{path.name}:" in capsys.readouterr().out


INLINE = [
    pytest.param(command, marks=[pytest.mark.slow] if command.startswith(("make ", "python ")) else [], id=command)
    for command in inline_commands()
    if command not in ELSEWHERE
]


@pytest.mark.parametrize("command", INLINE)
def test_commands_within_a_text_run(command: str, open_terminal: Open, request: pytest.FixtureRequest) -> None:
    if command.startswith("make "):
        checkout = request.getfixturevalue("checkout")
        _run(open_terminal(starts_service=True, folder=checkout, source=checkout), command)
    else:
        _run(open_terminal(starts_service="8000" not in command), command)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources whose virtual environment is this one, as complete as make wants it."""
    copy = tmp_path / "checkout"
    unwanted = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "*.whl")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    (copy / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".stamp"):
            (copy / ".venv" / entry.name).symlink_to(entry)
    for stamp in ("venv", "torch", "install", "dev"):
        (copy / ".venv" / f".stamp-{stamp}").touch()
    return copy
