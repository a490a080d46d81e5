"""What every command says of itself, word for word, and what it must not load to say it.

After a change that is meant: UPDATE_HELP=1 pytest tests/tandem/test_help.py, then look at the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.cli import _COMMANDS, _PROCESSES, main, parser_of

HELP = Path(__file__).parent / "help"
TEXTS = {"tandem": [], "models-pull": ["models", "pull"], "models-remove": ["models", "remove"]}
TEXTS |= {command: [command] for command in _COMMANDS}
HEAVY = ("torch", "transformers", "llguidance", "tokenizers", "huggingface_hub")
LIGHT_TOO = ("pydantic", "aiohttp", "numpy", "rich", "yaml", "argcomplete", "zmq")


@pytest.mark.parametrize("name", TEXTS)
def test_help_is_as_it_was_read(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    if name in _PROCESSES:  # what runs them is for processes of their own; test_cli.py does that
        out = parser_of(name).format_help()
    else:
        with suppress(SystemExit):
            main([*TEXTS[name], "--help"])
        out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 110
    path = HELP / f"{name}.txt"
    if os.environ.get("UPDATE_HELP"):
        path.write_text(out)
    assert out == path.read_text(), "see above how to renew it"


def test_there_is_a_text_for_each_command_and_no_other() -> None:
    assert {path.stem for path in HELP.iterdir()} == set(TEXTS)


@pytest.mark.parametrize(
    ("argv", "unwanted"),
    [
        (["--help"], (*HEAVY, *LIGHT_TOO)),
        *[([command, "--help"], HEAVY) for command in _COMMANDS if command not in ("proxy", "prefill", "decode")],
        (["proxy", "--help"], ("torch", "transformers")),
        (["config", "decode"], HEAVY),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_comes_without_waiting_for_what_it_does_not_need(argv: list[str], unwanted: tuple[str, ...]) -> None:
    code = (
        "import sys, contextlib\n"
        "from tandem.cli import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert result.stdout
    assert not set(unwanted) & set(result.stderr.split())
