"""compose.yaml, compose.gpu.yaml and Dockerfile, read without an engine.

Every command line in them is parsed by what it starts, and where they have to agree with each other and with the code,
they are compared. What containers then do: live_compose.py.
"""

from __future__ import annotations

import http.server
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.command_line import Flags, read_config
from common.config_file import config_class_of
from common.plane_security import load_cluster_security
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from proxy.config import ProxyConfig
from tandem.keygen import build_parser as keygen_parser
from tandem.keygen import write_secret
from tandem.models import build_parser as models_parser

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROCESSES = ("proxy", "prefill", "decode")
DEFAULT_MODEL = "smollm2-135m-instruct"


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """As Compose does, with these variables set."""

    def value(match: re.Match[str]) -> str:
        variable, operator, default = match.groups()
        is_set = bool(variables.get(variable)) if operator == ":-" else variable in variables
        return variables[variable] if is_set else default or ""

    return re.sub(r"\$\{(\w+)(?:(:?-)([^}]*))?\}", value, text)


def load(name: str, **variables: str) -> dict[str, Any]:
    """The file as Compose reads it with these variables set."""
    return dict(yaml.safe_load(fill_in((ROOT / name).read_text(), variables)))


def environment(service: dict[str, Any], tandem_env: str = "", **variables: str) -> dict[str, str]:
    """Of its containers. tandem_env: what the user's file says; each file sees those before it, behind the shell."""
    found: dict[str, str] = {}
    for file in service["env_file"]:
        text = tandem_env if file["path"] == "tandem.env" else (ROOT / file["path"]).read_text()
        lines = (line.partition("=") for line in text.splitlines() if line and not line.startswith("#"))
        for name, _, value in lines:
            found[name] = fill_in(value, {**found, **variables})
    return {**found, **{name: str(value) for name, value in service["environment"].items()}}


@pytest.fixture
def services() -> dict[str, Any]:
    return dict(load("compose.yaml")["services"])


@pytest.fixture
def config_of(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """What a service's process would run with; ends the test as the process would end."""

    def read(name: str) -> Flags:
        for variable, text in environment(services[name]).items():
            monkeypatch.setenv(variable, text)
        command, *flags = services[name]["command"]
        return read_config(config_class_of(command), flags, prog=f"tandem {command}").config

    return read


def test_each_process_takes_its_command_line(config_of: Callable[[str], Any]) -> None:
    kinds = {"proxy": ProxyConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
    for name, kind in kinds.items():
        config = config_of(name)
        assert type(config) is kind
        assert config.model == DEFAULT_MODEL
        assert config.served_model_name is None
        assert str(config.cluster_secret_file) == "/run/tandem/secret"


def test_the_parts_find_each_other(services: dict[str, Any], config_of: Callable[[str], Any]) -> None:
    proxy, prefill, decode = map(config_of, PROCESSES)
    control_port = proxy.control_endpoint.rpartition(":")[2]
    assert prefill.proxy == decode.proxy == (f"tcp://proxy:{control_port}",)
    assert services["proxy"]["ports"] == [f"127.0.0.1:8000:{proxy.port}"]
    assert prefill.fetch_host == "0.0.0.0"
    assert proxy.host == "0.0.0.0"
    for name, config in zip(PROCESSES, (proxy, prefill, decode), strict=True):
        assert services[name]["healthcheck"]["test"][-1] == str(config.port)


def test_what_is_bound_beyond_loopback_needs_the_secret(config_of: Callable[[str], Any], tmp_path: Path) -> None:
    write_secret(tmp_path / "secret")
    proxy, prefill, _ = map(config_of, PROCESSES)
    secured = load_cluster_security(proxy.model_copy(update={"cluster_secret_file": tmp_path / "secret"}))
    assert not proxy.insecure
    assert not prefill.insecure
    secured.control.check(proxy.control_endpoint)
    secured.fetch.check(f"tcp://{prefill.fetch_host}:{prefill.fetch_port}")


def test_variables_of_processes_are_flags_of_theirs(services: dict[str, Any]) -> None:
    gpu = load("compose.gpu.yaml")["services"]
    for name in PROCESSES:
        fields = config_class_of(name).model_fields
        services[name]["env_file"] += gpu.get(name, {}).get("env_file", [])  # as Compose joins them
        unknown = {v for v in environment(services[name]) if v.startswith("TANDEM_")} - {
            f"TANDEM_{field.upper()}" for field in fields
        }
        assert unknown == set(), name


def test_the_secret_and_the_model_come_first(services: dict[str, Any]) -> None:
    shell, flag, script = services["secret"]["entrypoint"]
    assert (shell, flag) == ("sh", "-c")
    test, make = script.split(" || ")
    command = shlex.split(make.removeprefix("exec "))
    assert command[:2] == ["tandem", "keygen"]
    assert str(keygen_parser().parse_args(command[2:]).file) == test.split()[-1] == "/run/tandem/secret"
    shell, flag, script = services["model"]["entrypoint"]
    assert (shell, flag) == ("sh", "-c")
    model = environment(services["model"])["TANDEM_MODEL"]
    tandem, models, *arguments = shlex.split(script.removeprefix("exec ").replace("$$TANDEM_MODEL", model))
    pulled = models_parser().parse_args(arguments)
    assert (tandem, models, pulled.action, pulled.name) == ("tandem", "models", "pull", DEFAULT_MODEL)
    for name in PROCESSES:
        conditions = {other: entry["condition"] for other, entry in services[name]["depends_on"].items()}
        assert conditions == dict.fromkeys(("secret", "model"), "service_completed_successfully")


def test_one_model_and_one_cache_for_all(services: dict[str, Any]) -> None:
    mine = load("compose.yaml", TANDEM_MODEL="/models/mine", TANDEM_MODELS_DIR="./models")
    for name in (*PROCESSES, "model"):
        assert "cache:/var/lib/tandem" in services[name]["volumes"]
        assert "no-models:/models:ro" in services[name]["volumes"]
        assert "./models:/models:ro" in mine["services"][name]["volumes"]
        assert environment(mine["services"][name], TANDEM_MODEL="/models/mine")["TANDEM_MODEL"] == "/models/mine"
    assert "TANDEM_CACHE_DIR=/var/lib/tandem" in DOCKERFILE
    assert set(mine["volumes"]) == {"cache", "secret", "no-models"}


def test_a_stop_waits_as_long_as_the_process_does(services: dict[str, Any], config_of: Callable[[str], Any]) -> None:
    waits = {"proxy": "shutdown_grace_seconds", "prefill": "drain_seconds", "decode": "drain_seconds"}
    for name, field in waits.items():
        assert float(services[name]["stop_grace_period"].removesuffix("s")) > getattr(config_of(name), field)
    longer = load("compose.yaml", TANDEM_STOP_GRACE_PERIOD="10m")["services"]
    assert {longer[name]["stop_grace_period"] for name in PROCESSES} == {"10m"}


def test_a_setting_comes_from_the_shell_else_tandem_env_else_the_default(services: dict[str, Any]) -> None:
    """`environment` would hide what tandem.env says, even where nothing was set."""
    assert not [
        name for name in PROCESSES if any("${" in str(value) for value in services[name]["environment"].values())
    ]
    for name in PROCESSES:
        for variable in environment(services[name]).keys() - services[name]["environment"].keys():
            assert environment(services[name], f"{variable}=mine")[variable] == "mine"
            assert environment(services[name], f"{variable}=mine", **{variable: "shell"})[variable] == "shell"
    assert environment(services["decode"], "TANDEM_DRAIN_SECONDS=5")["TANDEM_DRAIN_SECONDS"] == "5"
    assert environment(services["proxy"])["TANDEM_API_KEY"] == ""


def test_what_fetches_the_model_has_what_that_needs_and_nobody_else(services: dict[str, Any]) -> None:
    for variable in ("HF_TOKEN", "PIP_INDEX_URL"):
        assert {name for name in (*PROCESSES, "model") if variable in environment(services[name])} == {"model"}
    assert {environment(services[name])["HF_HUB_OFFLINE"] for name in PROCESSES} == {"1"}
    assert "HF_HUB_OFFLINE" not in environment(services["model"])


def test_what_cannot_go_better_a_second_time_is_not_tried_again(services: dict[str, Any]) -> None:
    assert services["model"]["restart"] == "no"
    assert "restart" not in services["secret"]
    assert {services[name]["restart"] for name in PROCESSES} == {"on-failure:3"}


def test_no_registry_is_asked_for_what_is_built_here(services: dict[str, Any]) -> None:
    assert {service["pull_policy"] for service in services.values()} == {"never"}


def test_files_with_secrets_of_a_user_are_not_committed() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", "/tandem.env"} <= set(ignored)


def test_containers_may_do_little(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    assert {name for name in services if "ports" in services[name]} == {"proxy"}
    assert all("secret:/run/tandem:ro" in services[name]["volumes"] for name in PROCESSES)
    runtime = DOCKERFILE.split(" AS runtime\n")[1]
    assert re.search(r"^USER tandem$", runtime, re.MULTILINE)
    assert runtime.count("\nUSER ") == 1


def test_every_setting_is_explained_above_the_services() -> None:
    texts = [(ROOT / name).read_text() for name in ("compose.yaml", "compose.gpu.yaml")]
    explained = "\n".join(line for text in texts for line in text.splitlines() if line.startswith("#"))
    texts += [(ROOT / file).read_text() for file in re.findall(r"path: (deploy/\S+\.env)", "\n".join(texts))]
    used = set(re.findall(r"\$\{(\w+)", "\n".join(texts)))
    assert len(texts) == 6
    assert {variable for variable in used if variable not in explained} == set()


# --- images -----------------------------------------------------------------------------------------------------------


def arguments_of(name: str) -> dict[str, str]:
    """Defaults of the Dockerfile's build arguments, with those of a compose file's prefill service over them."""
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    return {**defaults, **load(name)["services"]["prefill"]["build"]["args"]}


def test_services_are_built_from_stages_that_exist(services: dict[str, Any]) -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    built = {services[name]["image"]: services[name]["build"]["target"] for name in ("proxy", "prefill")}
    assert built == {"tandem-proxy:latest": "proxy", "tandem-node:latest": "node"}
    assert set(built.values()) <= set(stages)
    assert {service["image"] for service in services.values()} == set(built)
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for name in ("compose.yaml", "compose.gpu.yaml"):
        assert arguments_of(name).keys() <= declared
    assert f"ARG BASE_IMAGE={arguments_of('compose.yaml')['BASE_IMAGE']}\n" in DOCKERFILE


def requirements(*extras: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/requirements.py", *extras]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def names_of(*extras: str) -> set[str]:
    return {re.split(r"[<>=\[]", line)[0] for line in requirements(*extras).stdout.split()}


def test_images_get_what_pyproject_lists_and_the_proxy_no_torch() -> None:
    proxy_extra = re.search(r"requirements\.py (\w+) >list\.txt && pip", DOCKERFILE)
    assert proxy_extra is not None
    node_extras = [arguments_of(name)["EXTRAS"] for name in ("compose.yaml", "compose.gpu.yaml")]
    proxy, node, gpu = (names_of(*extras.split()) for extras in (proxy_extra[1], *node_extras))
    assert {"aiohttp", "pyzmq", "tokenizers"} <= proxy
    assert {"torch", "llguidance"} & proxy == set()
    assert proxy | {"torch", "llguidance"} <= node  # torch by this name: the Dockerfile installs it first
    assert node | {"flashinfer-python"} <= gpu


def test_torch_of_a_gpu_image_does_not_come_from_wheels_for_cpus(tmp_path: Path) -> None:
    assert torch_source(tmp_path, "", ["engine"]) == "\n"
    assert torch_source(tmp_path, "https://example.org/cpu", ["engine"]) == "--index-url https://example.org/cpu\n"
    (tmp_path / "README.md").touch()
    (tmp_path / "torch-2.13.0+cpu-cp311.whl").touch()
    for index in ("", "https://example.org/cpu"):
        assert torch_source(tmp_path, index, ["engine"]) == f"--no-index --find-links {tmp_path}\n"
    assert "cuda" in arguments_of("compose.gpu.yaml")["EXTRAS"].split()
    assert torch_source(tmp_path, "", ["engine", "cuda"]) == "\n"


def torch_source(wheels: Path, index: str, extras: list[str]) -> str:
    command = [sys.executable, "deploy/torch_source.py", str(wheels), index, *extras]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_without_a_compiler_all_but_the_compiled_kernels_is_installed(tmp_path: Path) -> None:
    """As for the proxy's image."""
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path),
    ]
    missing = {**os.environ, "CC": "no-compiler", "CXX": "no-compiler"}
    result = subprocess.run(command, cwd=ROOT, env=missing, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "installing without them, plain torch serves instead" in result.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_an_extra_that_pyproject_lacks_ends_the_build() -> None:
    result = requirements("engines")
    assert result.returncode == 1
    assert "unknown extra 'engines', must be one of " in result.stderr


def test_the_build_sees_the_packages_and_nothing_else() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name for name in pyproject["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in name}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    read_by_dockerfile = set(re.findall(r"deploy/\w+(?:\.py)?", re.sub(r"^#.*", "", DOCKERFILE, flags=re.MULTILINE)))
    assert "*" in lines
    assert let_in == packages | {"pyproject.toml", "setup.py", pyproject["project"]["readme"]} | read_by_dockerfile
    assert all((ROOT / path).exists() for path in let_in)


# --- the health check -------------------------------------------------------------------------------------------------


class Answers(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()
        self.wfile.write(b'{"status": "as told"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
def test_the_health_check_says_what_ready_says(
    server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, status: int, exit_status: int
) -> None:
    monkeypatch.setattr(Answers, "status", status)
    result = check_health(server.server_port)
    assert (result.returncode, result.stdout) == (exit_status, '{"status": "as told"}\n')


def test_the_health_check_of_a_dead_process() -> None:
    result = check_health(1)
    assert result.returncode == 1
    assert "no answer at port 1: " in result.stderr


def check_health(port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "deploy/healthcheck.py", str(port)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
