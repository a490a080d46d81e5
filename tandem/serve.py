"""`tandem serve`: one proxy, some prefill and decode nodes, on this machine, as one service.

resolve the model -> check the port -> start the processes -> say where it listens -> until Ctrl-C, SIGTERM or a death
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Final, TextIO

from common.checkpoints.cache import default_cache_dir
from common.checkpoints.resolve import resolve_model
from common.command_line import CONFIG_FLAG, ENV_PREFIX, Resolved, flag_name, read_config, to_flags
from common.config import ClusterFlags, EngineFlags
from common.config_variables import QUIET, warn_of_unknown_variables
from common.cpu_limits import usable_cores
from common.errors import ConfigError, TandemError
from common.logging import configure_logging
from common.node_http import listen_error
from tandem.child import ChildSpec
from tandem.config import ServeConfig
from tandem.supervisor import Supervisor
from tandem.termination import is_ignored, termination_as_interrupt

_CONTROL_PORT: Final = 8100
_DECIDED: Final = {
    "proxy": {"model", "served_model_name", "host", "port", "control_endpoint"},
    "prefill": {"model", "served_model_name", "proxy", "host", "port", "fetch_port"},
    "decode": {"model", "served_model_name", "proxy", "host", "port", "fetch_port"},
}
_MEMORY_OF_NODES: Final = 0.8
_EXIT_SECONDS: Final = 1.0  # beyond its drain, for a process to leave by itself
_SHARED: Final = set(ClusterFlags.model_fields)  # with the proxy too
_PASSED_ON: Final = (_SHARED | set(EngineFlags.model_fields)) - {
    "model",
    "served_model_name",
    "num_threads",
    "cpu_memory_utilization",
    "record_steps",
}


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 after Ctrl-C or SIGTERM, 1 when the service could not start or go on."""
    resolved = read_config(ServeConfig, argv, prog="tandem serve")
    config = resolved.config
    configure_logging(config.log_level, "serve", log_format=config.log_format)
    warn_of_unknown_variables()
    try:
        with termination_as_interrupt():
            model = resolve_model(config.model)
            port = available_port(config.host, config.port)
            specs = make_specs(resolved, model, port, config.control_endpoint or _control_endpoint())
            for line in ignored_keys(resolved):
                _report(line)
            return asyncio.run(run(config, specs, _make_log_dir(config, port)))
    except TandemError as error:
        _report(f"tandem serve: {error.message}")
        return 1
    except KeyboardInterrupt:
        _report("tandem serve: stopped before anything was started")
        return 0


async def run(config: ServeConfig, specs: Sequence[ChildSpec], log_dir: Path) -> int:
    """Supervises until a signal comes (0) or the service cannot go on (raises UnavailableError)."""
    supervisor = Supervisor(specs, log_dir, _report)
    stop = _stop_on_signals(supervisor)
    _report(f"Starting {', '.join(spec.name for spec in specs)}; logs in {log_dir}")
    life = asyncio.create_task(_live(supervisor, config, specs))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        else:
            _report("Stopping (Ctrl-C again stops at once) ...")
    finally:
        life.cancel()
        stopped.cancel()
        await asyncio.gather(life, stopped, return_exceptions=True)
        await supervisor.stop(config.drain_seconds + _EXIT_SECONDS)
    return 0


def make_specs(resolved: Resolved[ServeConfig], model: Path, port: int, control: str) -> list[ChildSpec]:
    """The command line of every process.

    Only what was given to `tandem serve` itself is passed on; environment and config file the processes read
    themselves, each its own section.
    """
    config = resolved.config
    names = {"model": str(model), "served_model_name": config.public_model_name}
    url = f"http://{_reachable(config.host)}:{port}"
    own = {"host": config.host, "port": port, "control_endpoint": control}
    grace = {"shutdown_grace_seconds": config.drain_seconds}
    flags = _flags(resolved, "proxy", {**names, **own}, grace, _SHARED)
    specs = [_spec("proxy", "proxy", url, [*flags, *config.proxy_args])]
    shares = _shares(resolved)
    for role, count, extra in (
        ("prefill", config.prefill, config.prefill_args),
        ("decode", config.decode, config.decode_args),
    ):
        for i in range(count):
            node_port = available_port("127.0.0.1", 0)
            name = f"{role}-{i}" if count > 1 else role
            own = {"proxy": control, "host": "127.0.0.1", "port": node_port, "fetch_port": 0}
            own |= _recording(config.record_steps, name)
            shared_out = {**shares, "drain_seconds": config.drain_seconds}
            flags = _flags(resolved, role, {**names, **own}, shared_out, _PASSED_ON)
            specs.append(_spec(name, role, f"http://127.0.0.1:{node_port}", [*flags, *extra]))
    return specs


def _flags(
    resolved: Resolved[ServeConfig],
    role: str,
    decided: Mapping[str, object],
    shared_out: Mapping[str, object],
    passed_on: Set[str],
) -> list[str]:
    """decided: what a process has no say in here. shared_out: what the section of its kind in the config file may
    set instead. passed_on: names of what goes on as it was given; that section wins over the one of serve."""
    section = resolved.file.section(role) if resolved.file else {}
    given = {name for name, origin in resolved.origins.items() if origin.kind == "flag"}
    given |= {name for name, origin in resolved.origins.items() if origin.section == "serve" and name not in section}
    own = {**decided, **{name: value for name, value in shared_out.items() if name in given or name not in section}}
    flags = [word for name, value in own.items() for word in (flag_name(name), str(value))]
    file = [CONFIG_FLAG, str(resolved.file.path.absolute())] if resolved.file else []
    return [*file, *flags, *to_flags(resolved.config, passed_on & given)]


def ignored_keys(resolved: Resolved[ServeConfig]) -> list[str]:
    """What the config file says to single processes, but `tandem serve` decides for them, one line each."""
    if (file := resolved.file) is None:
        return []
    own = set(type(resolved.config).model_fields)
    found = [
        (entry, f"{role}.{name}")
        for role, decided in _DECIDED.items()
        for name, entry in file.section(role).items()
        if name in decided
    ]
    found += [
        (entry, name) for name, entry in file.section(None).items() if name in set().union(*_DECIDED.values()) - own
    ]
    return [
        f"{file.path}:{entry.line}: {name} does not count here, `tandem serve` decides it"
        for entry, name in sorted(found, key=lambda one: one[0].line)
    ]


def _shares(resolved: Resolved[ServeConfig]) -> dict[str, object]:
    """Threads and memory of each node."""
    config, num_nodes = resolved.config, resolved.config.prefill + resolved.config.decode
    share = config.cpu_memory_utilization
    if resolved.origin("cpu_memory_utilization").kind == "default":
        text = f"{memory_per_node(num_nodes, share):.4f}"
    else:
        _check_memory(num_nodes, share)
        text = f"{share:g}"
    return {"num_threads": config.num_threads or threads_per_node(num_nodes), "cpu_memory_utilization": text}


def _check_memory(num_nodes: int, share: float) -> None:
    """Each node sees what is free before the others have touched theirs, so none of them would notice."""
    if num_nodes * share > 1:
        raise ConfigError(
            f"--cpu-memory-utilization is {share:g} for each of {num_nodes} nodes, together more than all of this"
            f" machine's memory; at most {math.floor(100 / num_nodes) / 100:g} goes"
        )


def _recording(path: Path | None, name: str) -> dict[str, object]:
    """Each node records into a file of its own: its name stands before the suffix."""
    if path is None:
        return {}
    if os.path.isdir(path):  # Path.is_dir would raise for a name that is too long, which the nodes refuse
        raise ConfigError(f"--record-steps is {path}, a folder; name a file, such as {path / 'steps.jsonl'}")
    return {"record_steps": path.with_name(f"{path.stem}.{name}{path.suffix}")}


def threads_per_node(num_nodes: int) -> int:
    return max(1, usable_cores() // num_nodes)


def memory_per_node(num_nodes: int, most: float) -> float:
    """Share of the machine's memory for each node: all of them together leave the rest of the machine its part."""
    return min(most, _MEMORY_OF_NODES / num_nodes)


def available_port(host: str, port: int) -> int:
    """`port` if one can listen there now, any free one for 0. Raises ConfigError saying why not.

    The socket is closed again, so another process may still be faster; it then fails with the same message.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # with SO_REUSEADDR a bind alone may succeed beside a listener
            return int(probe.getsockname()[1])
    except OSError as error:
        raise listen_error(host, port, error) from None


def ready_message(config: ServeConfig, url: str, control: str) -> str:
    body = {
        "model": config.public_model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    key = "-H 'Authorization: Bearer '$TANDEM_API_KEY " if os.environ.get(f"{ENV_PREFIX}API_KEY") else ""
    given = shlex.join(to_flags(config, {"served_model_name", *_PASSED_ON}))
    return (
        f"\nReady: {config.public_model_name} at {url}/v1\n\n"
        f"  curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        f"Another node: {_own_command()} decode {config.model} {given}{' ' if given else ''}--proxy {control}\n"
        f"Metrics: {url}/metrics\n"
        "Stop: Ctrl-C\n"
    )


def _own_command() -> str:
    """How a person can call us from here: the command may lie in a virtual environment that is not on the path."""
    return "tandem" if shutil.which("tandem") else os.path.relpath(Path(sys.executable).with_name("tandem"))


async def _live(supervisor: Supervisor, config: ServeConfig, specs: Sequence[ChildSpec]) -> None:
    await supervisor.start(config.startup_seconds)
    proxy = specs[0]
    control = proxy.command[proxy.command.index("--control-endpoint") + 1]
    _say(ready_message(config, proxy.health_url, control), sys.stdout)
    await supervisor.watch()


def _spec(name: str, role: str, url: str, flags: list[str]) -> ChildSpec:
    return ChildSpec(name, role, [sys.executable, "-m", "tandem", role, *flags], url, environment=QUIET)


def _stop_on_signals(supervisor: Supervisor) -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM; the second one kills."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    numbers = [signal.SIGINT, signal.SIGTERM, *([] if is_ignored(signal.SIGHUP) else [signal.SIGHUP])]  # nohup
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


def _control_endpoint() -> str:
    """The port that nodes dial by default, so that more of them can be added without a flag; or any free one."""
    try:
        port = available_port("127.0.0.1", _CONTROL_PORT)
    except ConfigError:
        port = available_port("127.0.0.1", 0)
    return f"tcp://127.0.0.1:{port}"


def _make_log_dir(config: ServeConfig, port: int) -> Path:
    log_dir = config.log_dir or default_cache_dir() / "logs" / f"port-{port}"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the log folder {log_dir}: {error.strerror}") from None
    return log_dir


def _reachable(host: str) -> str:
    """Where this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _report(message: str) -> None:
    _say(message, sys.stderr)


def _say(text: str, stream: TextIO) -> None:
    """A service does not end because nobody reads what it says, or because that has no room on a disk."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)
