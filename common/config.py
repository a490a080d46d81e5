"""Configuration of every process: flags first, then TANDEM_* environment variables, then defaults.

A config class is frozen and made once by `parse`. The names are vLLM's where vLLM has the flag. A wrong flag or value
ends the process with status 2 and one line that names the flag, the value and what is allowed.
This module knows no process in particular: each node's own config.py adds its flags.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, ByteSize, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from common.kv_layout import KVDType

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_CONTROL_ENDPOINT = "tcp://127.0.0.1:8100"
ENV_PREFIX = "TANDEM_"

LogLevel = Literal["debug", "info", "warning", "error"]
Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(gt=0, le=1)]
PreemptionMode = Literal["recompute", "swap", "auto"]
SchedulingPolicy = Literal["priority", "fcfs"]
Endpoints = Annotated[tuple[str, ...], NoDecode]  # NoDecode: "a,b" is split by us, not read as JSON

_ENDPOINT_SCHEMES = ("tcp://", "ipc://", "inproc://")


def default_num_threads() -> int:
    """Half of the cores this process may use: on one machine a prefill and a decode node share them."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def int_if_digits(value: object) -> object:
    """Flags and environment variables are text; a Literal of numbers wants numbers."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def check_size(value: object) -> object:
    """Raises ValueError for text that is no size: pydantic would take 1.5.2 for one byte."""
    if isinstance(value, str) and not _SIZE.fullmatch(value.strip()):
        raise ValueError("must be a size such as 512MiB or 4GiB")
    return value


def gibibytes_if_plain(value: object) -> object:
    """A number without a unit counts GiB, as vLLM's --swap-space does; one over a million can only mean bytes."""
    if isinstance(value, str) and value.strip()[-1:].isdecimal():
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value * 2**30 if value < 2**20 else value)
    return value


_SIZE = re.compile(r"\d{1,18}(\.\d{1,9})?\s*([A-Za-z]{1,3})?")
Size = Annotated[ByteSize, BeforeValidator(check_size)]
GibibytesOrSize = Annotated[ByteSize, BeforeValidator(gibibytes_if_plain), BeforeValidator(check_size)]


def split_endpoints(value: object) -> object:
    """'a,b' or ['a,b', 'c'] as a list of single endpoints; anything else is left for validation to refuse."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return [part.strip() for item in value for part in str(item).split(",") if part.strip()]


def check_endpoints(endpoints: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError unless there is at least one and each is a ZMQ endpoint."""
    if not endpoints:
        raise ValueError("must name at least one endpoint")
    for endpoint in endpoints:
        if not endpoint.startswith(_ENDPOINT_SCHEMES):
            raise ValueError(f"{endpoint!r} is no endpoint, must look like tcp://HOST:PORT or ipc://PATH")
    return endpoints


class Flags(BaseSettings):
    """Base of every process's config. Subclasses declare fields with `Field(description=...)`; the rest is here."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        validate_default=False,
        protected_namespaces=(),
    )
    positional: ClassVar[str | None] = None
    """Name of the field that may also be given as the first argument without a flag."""

    log_level: LogLevel = Field("info", description="least severe messages that are logged")


class ModelFlags(Flags):
    """Which model, for every process that needs its files."""

    positional: ClassVar[str | None] = "model"

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="alias, local directory, GGUF file or Hub id; may stand first without the flag",
    )
    served_model_name: str | None = Field(None, min_length=1, description="name that clients use; default: --model")

    @property
    def public_model_name(self) -> str:
        return self.served_model_name or self.model


class EngineFlags(ModelFlags):
    """How an engine computes and how much memory it takes."""

    dtype: KVDType = Field("float32", description="type of weights, activations and KV cache")
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt plus answer; default: the model's context"
    )
    num_threads: int = Field(0, ge=0, description="threads for computing; 0 takes half of the cores")

    block_size: Annotated[Literal[8, 16, 32], BeforeValidator(int_if_digits)] = Field(
        16, description="tokens in a KV block; the same on every node of a cluster"
    )
    gpu_memory_utilization: Share = Field(
        0.9, description="share of a GPU's memory for weights, activations and KV blocks; on a CPU the next flag rules"
    )
    cpu_memory_utilization: Share = Field(
        0.2, description="the same on a CPU, of the memory this process may use; several nodes share a machine"
    )
    kv_cache_memory_bytes: Size | None = Field(
        None, gt=0, description="memory for KV blocks, such as 2GiB; default: what the share above leaves"
    )
    num_gpu_blocks_override: int | None = Field(None, ge=2, description="number of KV blocks, whatever memory allows")
    enable_prefix_caching: bool = Field(True, description="keep finished blocks and reuse them for equal prefixes")
    swap_space: GibibytesOrSize | None = Field(
        None,
        ge=0,
        description="host memory for the blocks of preempted requests, such as 4GiB (a plain number counts GiB);"
        " default: an eighth of what the share above leaves, 0 beside a pool whose size was given",
    )
    preemption_mode: PreemptionMode = Field(
        "auto", description="what happens to a preempted request's KV; auto takes what costs less, as measured"
    )

    max_num_batched_tokens: int = Field(
        128, ge=1, description="token budget of a step; a larger one is faster in total and lets streams wait longer"
    )
    max_num_seqs: int = Field(
        64, ge=1, description="most requests that run at once; never more than the token budget holds"
    )
    enable_chunked_prefill: bool = Field(
        True,
        description="compute long prompts in chunks, beside streams; off: whole, with a token budget that by default"
        " holds the context",
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="most tokens of one prompt in a step, so that short ones pass by; 0: the budget alone"
    )
    max_num_partial_prefills: int = Field(4, ge=1, description="most prompts that are partly computed at once")
    scheduling_policy: SchedulingPolicy = Field(
        "priority", description="who goes first: smaller priority, then earlier; fcfs ignores priorities"
    )

    record_steps: Path | None = Field(
        None, description="file that gets one line of JSON for each step; `tandem steps FILE` draws it"
    )

    @property
    def resolved_num_threads(self) -> int:
        return self.num_threads or default_num_threads()


class NodeFlags(EngineFlags):
    """What prefill and decode nodes have in common."""

    proxy: Endpoints = Field(
        (DEFAULT_CONTROL_ENDPOINT,), description="control endpoint of a proxy; repeat or separate by commas for several"
    )
    host: str = Field("127.0.0.1", description="address of this node's HTTP server (/health /ready /metrics)")
    port: Port = Field(0, description="port of this node's HTTP server; 0 takes any free one")
    fetch_host: str = Field("127.0.0.1", description="address where peers fetch KV blocks from this node")
    fetch_port: Port = Field(0, description="port where peers fetch KV blocks from this node; 0 takes any free one")

    @field_validator("proxy", mode="before")
    @classmethod
    def _split_endpoints(cls, value: object) -> object:
        return split_endpoints(value)

    @field_validator("proxy")
    @classmethod
    def _check_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_endpoints(value)


# --- command line -------------------------------------------------------------------------------------------------

_C = TypeVar("_C", bound=Flags)


def parse(config_class: type[_C], argv: Sequence[str] | None = None, *, prog: str | None = None) -> _C:
    """The process's config from flags (`sys.argv[1:]` when argv is None) and environment.

    Exits with status 0 after --help and with status 2 after a wrong flag or value.
    """
    parser = build_parser(config_class, prog)
    namespace, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if unknown:
        parser.error(_unknown_message(unknown[0], config_class))
    given = {name: value for name, value in vars(namespace).items() if name in config_class.model_fields}
    if (first := getattr(namespace, _POSITIONAL, None)) is not None and config_class.positional:
        if config_class.positional in given:
            parser.error(f"{first!r} and {flag_name(config_class.positional)} are both given, one is enough")
        given[config_class.positional] = first
    try:
        return config_class(**given)
    except ValidationError as error:
        parser.error("; ".join(_describe(detail, given) for detail in error.errors()))


def build_parser(config_class: type[Flags], prog: str | None = None) -> argparse.ArgumentParser:
    """An argparse parser with one flag for each field; a flag that is not given is absent from its namespace."""
    parser = _Parser(
        prog=prog,
        description=(config_class.__doc__ or "").strip(),
        epilog=f"Each flag can also come from the environment: --log-level is {ENV_PREFIX}LOG_LEVEL. A flag wins.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    if config_class.positional:
        parser.add_argument(
            _POSITIONAL,
            nargs="?",
            default=None,
            metavar=config_class.positional.upper(),
            help=f"same as {flag_name(config_class.positional)}",
        )
    for name, field in config_class.model_fields.items():
        _add_flag(parser, name, field)
    return parser


def to_flags(config: Flags, names: Collection[str]) -> list[str]:
    """The flags that make another process take the same values; only what was given, so defaults stay its own."""
    flags: list[str] = []
    for name in sorted(config.model_fields_set & set(names)):
        value = getattr(config, name)
        if isinstance(value, bool):
            flags.append(flag_name(name) if value else flag_name(f"no_{name}"))
        elif value is not None:
            flags += [flag_name(name), _flag_text(value)]
    return flags


def _flag_text(value: object) -> str:
    if isinstance(value, ByteSize):
        return f"{int(value)}B"  # without a unit it might count something else
    return ",".join(value) if isinstance(value, tuple) else str(value)


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


_POSITIONAL = "positional_argument"


class _Parser(argparse.ArgumentParser):
    """Errors on one line: the usage of twenty flags would bury them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    annotation = _without_none(field.annotation)
    help_text = (field.description or "").replace("%", "%%") + _default_text(field)
    if annotation is bool:
        parser.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=help_text)
    elif get_origin(annotation) is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        parser.add_argument(flag_name(name), dest=name, choices=choices, help=help_text)
    else:
        action = "append" if get_origin(annotation) is tuple else "store"
        parser.add_argument(
            flag_name(name), dest=name, action=action, metavar=_metavar(name, annotation), help=help_text
        )


def _without_none(annotation: Any) -> Any:
    """`X | None` -> X."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if type(None) in get_args(annotation) and len(parts) == 1:
        return _without_annotated(parts[0])
    return annotation


def _without_annotated(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _metavar(name: str, annotation: Any) -> str:
    if annotation is ByteSize:
        return "SIZE"
    if annotation is Path:
        return "PATH"
    return "N" if annotation in (int, float) else name.rsplit("_", 1)[-1].upper()


def _default_text(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    if isinstance(default, tuple):
        default = ",".join(default)
    return "" if default in (None, "", []) or field.is_required() else f" (default: {default})"


def _unknown_message(argument: str, config_class: type[Flags]) -> str:
    flag = argument.split("=", 1)[0]
    if not flag.startswith("-"):
        return f"argument {argument!r} is not expected"
    close = difflib.get_close_matches(flag, [flag_name(name) for name in config_class.model_fields], n=1)
    return f"unknown flag {flag}" + (f", did you mean {close[0]}?" if close else "")


def _describe(detail: ErrorDetails, given: dict[str, Any]) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if detail["type"].startswith("byte_size"):
        message = "must be a size such as 512MiB or 4GiB"
    if not name:
        return message
    source = flag_name(name) if name in given else ENV_PREFIX + name.upper()
    return f"{source} is {_shown(detail['input'])}: {message[:1].lower()}{message[1:]}"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else repr(value)
