"""compose.yaml for real, in one life of a service: built, started, asked, scaled, hurt, scaled down, stopped.

`make test-compose` runs it where a container engine is to be had; the tests build on each other, in this order. Its
project, images and port are its own, so a service of yours on the same engine is left alone.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from common.checkpoints.resolve import resolve_model
from common.config import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "tandem-test"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY: dict[str, Any] = {
    "model": DEFAULT_MODEL,
    "prompt": "Once upon a time, in a small village by the sea,",
    "max_tokens": 200,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def docker(*arguments: str, seconds: float = 60, **variables: str) -> str:
    """What it prints, messages included. Fails the test when it fails or takes longer."""
    environment = {**os.environ, **variables}
    result = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert result.returncode == 0, f"docker {' '.join(arguments)}:\n{result.stdout}"
    return result.stdout


class Service:
    """The project on its engine, and the API that it publishes."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.variables = {"TANDEM_PORT": str(self.port), "TANDEM_TAG": "test", "COMPOSE_PROJECT_NAME": PROJECT}

    def compose(self, *arguments: str, seconds: float = 60, **variables: str) -> str:
        # the settings of whoever runs this, in .env, are not what is tested
        command = ("compose", "--progress", "quiet", "--env-file", os.devnull, *arguments)
        return docker(*command, seconds=seconds, **self.variables, **variables)

    def up(self, prefill: int, decode: int, **variables: str) -> None:
        scale = ("--scale", f"prefill={prefill}", "--scale", f"decode={decode}")
        self.compose("up", "--detach", "--wait", "--wait-timeout", "150", *scale, seconds=180, **variables)

    def containers(self, service: str) -> list[str]:
        """Ids of the running ones."""
        return self.compose("ps", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        return dict(json.loads(docker("inspect", container))[0])

    def address(self, container: str) -> str:
        return str(self.inspect(container)["NetworkSettings"]["Networks"][f"{PROJECT}_default"]["IPAddress"])

    def client(self) -> OpenAI:
        # no retries: what fails is to be seen
        http = httpx.Client(trust_env=False)
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0, http_client=http)

    def nodes(self) -> tuple[int, int]:
        """Prefill and decode nodes that the proxy counts on."""
        found = dict(re.findall(r'^tandem:nodes\{.*role="(\w+)".*\} (\d+)', self.metrics(), re.MULTILINE))
        return int(found.get("prefill", 0)), int(found.get("decode", 0))

    def containers_of_nodes(self, role: str) -> dict[str, str]:
        """By the id that the proxy knows the node by."""
        logs = {container: docker("logs", container) for container in self.containers(role)}
        return {re.findall(rf"{role} node ([\w-]+) s", text)[-1]: container for container, text in logs.items()}

    def busy_node(self, role: str) -> str | None:
        """Id of one that computes something now."""
        pattern = rf'^vllm:num_requests_running\{{.*node="([\w-]+)",role="{role}"\}} [1-9]'
        busy = re.search(pattern, self.metrics(), re.MULTILINE)
        return busy and busy[1]

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text

    def forget_prefixes(self) -> None:
        assert httpx.post(f"{self.url}/reset_prefix_cache", timeout=10, trust_env=False).status_code == 200

    def left_over(self) -> list[str]:
        label = f"label=com.docker.compose.project={PROJECT}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [name for kind in kinds for name in docker(*kind, "--quiet", "--filter", label).split()]


def wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
    """Its first value that is true."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {seconds} s; last: {value!r}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service()
    service.compose("down", "--volumes", "--timeout", "5")  # of a run that was killed
    try:
        yield service
        print(service.compose("logs", "--tail", "50"))  # pytest shows it when a test failed
    finally:
        service.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", seconds=90)
    assert service.left_over() == []


def test_builds_small_images(service: Service) -> None:
    service.compose("build", seconds=800)
    megabytes = {
        name: int(docker("image", "inspect", "--format", "{{.Size}}", f"tandem-{name}:test")) / 1e6
        for name in ("proxy", "node")
    }
    print(megabytes)
    assert megabytes["proxy"] < 300
    assert megabytes["node"] < 1500
    imports = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    docker("run", "--rm", "--entrypoint", "python", "tandem-proxy:test", "-c", imports)


def test_the_file_for_a_gpu_host_is_valid(service: Service) -> None:
    text = service.compose("--file", "compose.yaml", "--file", "compose.gpu.yaml", "config", "--format", "json")
    nodes = {name: json.loads(text)["services"][name] for name in ("prefill", "decode")}
    for node in nodes.values():
        assert node["image"] == "tandem-node-cuda:test"
        devices = node["deploy"]["resources"]["reservations"]["devices"]
        assert devices == [{"capabilities": ["gpu"], "driver": "nvidia", "device_ids": ["0"]}]
    assert nodes["prefill"]["build"]["args"]["TORCH_INDEX"] == ""
    assert nodes["prefill"]["build"]["target"] == "node"


def test_containers_that_start_together_fetch_the_model_once(service: Service) -> None:
    service.compose("create")
    command = ("run", "--rm", "--no-deps", "--no-TTY", "model")
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(lambda _: service.compose(*command, seconds=120), range(3)))
    assert sum(text.count("downloading") for text in said) == 1
    assert all(f"{DEFAULT_MODEL} is in /var/lib/tandem/" in text for text in said)


def test_comes_up_with_one_command(service: Service) -> None:
    service.up(prefill=1, decode=1)
    assert service.nodes() == (1, 1)
    assert "warning" not in service.compose("logs")
    for name in ("proxy", "prefill", "decode"):
        (container,) = service.containers(name)
        assert docker("exec", container, "id", "-u").strip() == "10001"
    for container in (*service.containers("prefill"), *service.containers("decode")):
        assert f"{container[:12]}-" in service.compose("exec", "--no-TTY", "proxy", "tandem", "status")
    (proxy,) = service.containers("proxy")
    ports = service.inspect(proxy)["NetworkSettings"]["Ports"]
    assert {key: value for key, value in ports.items() if value} == {
        "8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(service.port)}]
    }


def test_answers_as_openai_does(service: Service) -> None:
    with service.client() as client:
        assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
        whole = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model=DEFAULT_MODEL,
                messages=QUESTION,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "Paris" in whole.choices[0].message.content
    assert (whole.object, whole.choices[0].finish_reason) == ("chat.completion", "stop")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    *deltas, last, usage = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == whole.choices[0].message.content
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    (prefill,) = service.containers("prefill")
    assert "tandem:fetches_total" in node_metrics(prefill), "the decode node computed the prompt itself"


def node_metrics(container: str) -> str:
    """Counters of fetches that a node has answered."""
    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8001/metrics').read().decode())"
    text = docker("exec", container, "python", "-c", script)
    return "\n".join(line for line in text.splitlines() if re.match(r"tandem:fetches_total\{.*\} [1-9]", line))


def test_scales_up_beside_what_runs(service: Service) -> None:
    before = {name: service.containers(name) for name in ("proxy", "prefill", "decode")}
    service.up(prefill=2, decode=3)
    wait_for(lambda: service.nodes() == (2, 3))
    for name, containers in before.items():
        assert set(containers) <= set(service.containers(name)), f"{name} was replaced"
    with service.client() as client, ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda _: client.completions.create(**{**STORY, "max_tokens": 20}), range(6))
        assert {answer.usage.completion_tokens for answer in answers} == {20}


def test_a_killed_prefill_node_costs_time_only(service: Service) -> None:
    prompt = [1000 + i * 37 % 20000 for i in range(2000)]
    body: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    containers = service.containers_of_nodes("prefill")
    with service.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, **body)
        docker("kill", containers[wait_for(lambda: service.busy_node("prefill"))])
        assert not answer.done(), "the prompt was computed before the node was killed"
        hurt = answer.result(timeout=120)
        service.forget_prefixes()
        right = client.completions.create(**body)
    assert hurt.choices[0].text == right.choices[0].text
    assert hurt.usage.completion_tokens == 8
    wait_for(lambda: service.nodes() == (1, 3))


def test_a_stream_outlives_its_decode_node_which_comes_back(service: Service) -> None:
    containers = service.containers_of_nodes("decode")
    with service.client() as client:
        right = client.completions.create(**STORY).choices[0].text
        stream = client.completions.create(**STORY, stream=True, stream_options={"include_usage": True})
        pieces = [next(stream).choices[0].text for _ in range(10)]
        victim = containers[wait_for(lambda: service.busy_node("decode"))]
        docker("exec", victim, "sh", "-c", "kill -KILL -1; true")  # all but its init, as if it had crashed
        at_once = client.completions.create(**{**STORY, "max_tokens": 5})
        *rest, usage = list(stream)
        pieces += [chunk.choices[0].text for chunk in rest]
    assert at_once.usage.completion_tokens == 5
    assert "".join(pieces) == right
    assert usage.usage.completion_tokens == STORY["max_tokens"]
    assert re.search(r'^tandem:request_legs_total\{cause="lost",.*\} [1-9]', service.metrics(), re.MULTILINE)
    wait_for(lambda: service.inspect(victim)["RestartCount"] == 1)
    wait_for(lambda: service.nodes() == (1, 3))


def test_nodes_follow_a_proxy_that_is_at_another_address(service: Service) -> None:
    """It vanishes without a word, and its name means another address when it is back."""
    (proxy,) = service.containers("proxy")
    nodes = service.containers("prefill") + service.containers("decode")
    network, before = f"{PROJECT}_default", service.address(proxy)

    def all_said(pattern: str) -> bool:
        return all(re.search(pattern, docker("logs", node), re.DOTALL) for node in nodes)

    docker("network", "disconnect", network, proxy)
    wait_for(lambda: all_said("; dialling it again"), seconds=30)
    sit = ("run", "--detach", "--rm", "--network", network, "--entrypoint", "sleep", "tandem-proxy:test", "60")
    sitter = docker(*sit).strip()  # at the old address
    try:
        docker("network", "connect", "--alias", "proxy", network, proxy)
        assert service.address(proxy) != before
        wait_for(lambda: all_said("; dialling it again.* joined proxy"), seconds=30)
        assert sum(service.nodes()) == len(nodes)
    finally:
        docker("rm", "--force", sitter)


def test_scales_down_while_it_answers(service: Service) -> None:
    with service.client() as client, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(client.completions.create, **{**STORY, "max_tokens": 100}) for _ in range(3)]
        wait_for(lambda: service.busy_node("decode"))
        service.up(prefill=1, decode=1)
        assert {answer.result(timeout=120).usage.completion_tokens for answer in answers} == {100}
    wait_for(lambda: service.nodes() == (1, 1))
    assert [len(service.containers(name)) for name in ("prefill", "decode")] == [1, 1]


def test_serves_a_model_of_a_folder_of_yours(service: Service) -> None:
    folder = resolve_model(DEFAULT_MODEL)
    mine = {"TANDEM_MODELS_DIR": str(folder.parent), "TANDEM_MODEL": f"/models/{folder.name}"}
    service.up(prefill=1, decode=1, TANDEM_SERVED_MODEL_NAME="mine", TANDEM_API_KEY="key of a test", **mine)
    assert httpx.get(f"{service.url}/v1/models", timeout=10, trust_env=False).status_code == 401
    with service.client().with_options(api_key="key of a test") as client:
        assert [model.id for model in client.models.list()] == ["mine"]
        assert (
            "Paris"
            in client.chat.completions.create(model="mine", messages=QUESTION, temperature=0).choices[0].message.content
        )


def test_every_process_ends_well_when_told_to(service: Service) -> None:
    containers = [container for name in ("proxy", "prefill", "decode") for container in service.containers(name)]
    service.compose("stop", seconds=40)
    states = {service.inspect(container)["Name"]: service.inspect(container)["State"] for container in containers}
    assert len(states) == 3
    assert {name: state["ExitCode"] for name, state in states.items()} == dict.fromkeys(states, 0)
    assert [docker("logs", container).splitlines()[-1].split()[-1] for container in containers] == ["stopped"] * 3
