"""Promises that the repository makes about itself: its commands, documents, packages and imports."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "decode_node", "kernels", "kvtransfer", "prefill_node", "proxy", "tandem")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_names() -> list[str]:
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


# A fork of one process for each module: a fresh interpreter each would pay for torch a hundred times. What torch is
# made of is imported beforehand; no module of ours is.
_IMPORT_EACH_ALONE = """
import importlib, json, os, sys, traceback
import torch, aiohttp, zmq, pydantic_settings, prometheus_client
names, failures = json.loads(sys.argv[1]), {}
for name in names:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            os.write(write, traceback.format_exc()[-2000:].encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        if text := pipe.read():
            failures[name] = text
    os.waitpid(pid, 0)
print(json.dumps(failures))
"""


def test_every_module_imports_alone() -> None:
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", _IMPORT_EACH_ALONE, json.dumps(module_names())]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == {}


@pytest.mark.parametrize("module", ["proxy.app", "kvtransfer.client", "common.checkpoints.resolve", "tandem.serve"])
def test_torch_stays_out_of_processes_that_do_not_compute(module: str) -> None:
    not_declared = "{'torch', 'transformers', 'llguidance'}"
    script = f"import {module}, sys; print(sorted({not_declared} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_without_torch_says_what_to_install(role: str) -> None:
    script = (
        "import importlib.util as u, runpy, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'torch' else find(name)\n"
        f"runpy.run_module('{role}_node', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    expected = f"tandem {role}: torch not installed: nodes and LLM need pip install 'tandem-serve[engine]'"
    assert result.stderr.strip() == expected


def test_transformers_does_not_take_our_kernels_for_the_package_it_probes() -> None:
    from transformers.utils import is_kernels_available

    import kernels

    assert kernels.__version__ == "0.0.0"
    assert not is_kernels_available()
    assert tuple(map(int, PYPROJECT["project"]["version"].split("."))) < (0, 10)


def test_base_modules_of_common_stand_in_the_import_contracts() -> None:
    base = {f"common.{path.stem}" for path in (ROOT / "common").glob("*.py") if path.stem != "__init__"}
    contracts = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    assert set(contracts["base"]["source_modules"]) == base
    assert base <= set(contracts["no-torch"]["source_modules"])


def test_every_imported_distribution_is_declared() -> None:
    declared = {
        re.split(r"[<>=\[]", text)[0].lower().replace("_", "-") for text in PYPROJECT["project"]["dependencies"]
    }
    distribution_of = {"zmq": "pyzmq", "pydantic_core": "pydantic", "yaml": "pyyaml", "flashinfer": "flashinfer-python"}
    extras = PYPROJECT["project"]["optional-dependencies"]
    of_users = [text for name, texts in extras.items() if name != "dev" for text in texts]
    extra = {re.split(r"[<>=]", text)[0] for text in of_users}
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE):
                if name not in sys.stdlib_module_names and name not in PACKAGES:
                    found[distribution_of.get(name, name).lower().replace("_", "-")] = str(path)
    assert {name: path for name, path in found.items() if name not in declared | extra} == {}


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        used = set(re.findall(r"^(?:`)?make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
        assert used, document
        assert used <= targets, document


def test_make_serve_and_test_run_what_they_say() -> None:
    for target, expected in (("serve", "tandem serve"), ("test", 'pytest -q -m "not slow and not gpu"')):
        # As a person calls it: the tests may themselves run under make, whose variables would change the output.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        plan = subprocess.run(
            ["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout
        assert expected in plan.splitlines()[-1]


def test_commands_in_the_readme_parse() -> None:
    from tandem.cli import parser_of

    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^tandem (\w+) +(.*?)(?:#.*)?$", text, re.MULTILINE)
    commands += [("serve", flags) for flags in re.findall(r'make serve ARGS="(.*?)"', text)]
    assert len(commands) >= 4
    for name, flags in commands:
        parser_of(name).parse_args(flags.split())


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_architecture_is_short_and_names_files_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert len(text.splitlines()) <= 60
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text):
        assert (ROOT / name).exists() or list(ROOT.glob(f"*/{name}")), f"{name} does not exist"
    for package in PACKAGES:
        assert f"`{package}`" in text


def test_no_file_of_ours_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    forbidden = re.compile(r"(pypi\.org|pythonhosted|npmjs|deb\.debian|index-" r"url=|/wor" r"k/|/ro" r"ot/)")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ""} and path.is_file():
            match = forbidden.search(path.read_text(errors="replace"))
            assert match is None or path == Path(__file__), f"{name} contains {match and match[0]}"


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools in the environment")
def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (*PACKAGES, "tests", "benchmarks", "pyproject.toml", "README.md"):
        (source / name).symlink_to(ROOT / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert set(module_names()) <= {
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in names if name.endswith(".py")
    }
