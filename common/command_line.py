"""How a process gets its config: flag, then TANDEM_* environment variable, then the file of --config, then default.

A config class is frozen and made once, by `parse` or `read_config`. A wrong flag, value or key ends the process with
status 2 and one line that names it, its value and what is allowed. Knows no process in particular.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ByteSize, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from common.argument_parser import Parser
from common.config_file import PROCESSES, ConfigFile, config_class_of, read_config_file
from common.errors import ConfigError
from common.logging import LogFormat, parse_levels

ENV_PREFIX = "TANDEM_"
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"

OriginKind = Literal["flag", "environment", "file", "default"]

_POSITIONAL = "positional_argument"
_CONFIG = "config_file_argument"


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
    title: ClassVar[str] = "every process"
    """Above the flags in --help that a class declares."""
    of_one_process: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that a config file sets in a section only: two processes with the same value clash."""

    log_level: str = Field(
        "info",
        description="least severe messages that are logged: debug, info, warning or error; of single packages, too, as"
        " in info,kvtransfer=debug",
    )
    log_format: LogFormat = Field("text", description="form of the log lines; json: an object a line")

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        check_kind(value, kinds_of(cls.model_fields[info.field_name].annotation))
        return value

    @field_validator("log_level")
    @classmethod
    def _check_log_level(cls, value: str) -> str:
        parse_levels(value)
        return value


def check_kind(value: object, kinds: set[object]) -> None:
    """Raises ValueError for what pydantic would bend until it fits: True is no 1, 16.0 no 16, "" no path (it would be
    the current folder) and no name."""
    is_number = bool(kinds & {int, float, ByteSize})
    if isinstance(value, bool) and is_number and bool not in kinds:
        raise ValueError("must be a number")
    if isinstance(value, int | float) and bool in kinds and not is_number and not isinstance(value, bool):
        raise ValueError("must be true or false")
    if isinstance(value, float) and int in kinds:
        raise ValueError("must be an integer")
    if isinstance(value, str) and kinds & {str, Path}:
        if not value:
            raise ValueError("must not be empty; leave it out for the default")
        if "\0" in value:
            raise ValueError("must not contain a zero byte")


def kinds_of(annotation: Any) -> set[object]:
    """The types that a value of this annotation may have, without what is only said of them."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds_of(arguments[0])
    if origin is Literal:
        return set(map(type, arguments))
    if origin in (Union, types.UnionType):
        return set().union(*map(kinds_of, arguments))
    return {annotation}


_C = TypeVar("_C", bound=Flags)


@dataclass(frozen=True)
class Origin:
    """Where a value came from. place: flag, environment variable or file:line. section: of the file, None at its top
    level."""

    kind: OriginKind
    place: str = ""
    section: str | None = None

    def __str__(self) -> str:
        return self.place or self.kind


@dataclass(frozen=True)
class Resolved(Generic[_C]):
    """A config, and where each of its values came from."""

    config: _C
    origins: Mapping[str, Origin]
    file: ConfigFile | None

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, Origin("default"))


def parse(config_class: type[_C], argv: Sequence[str] | None = None, *, prog: str | None = None) -> _C:
    """The process's config. Exits with status 0 after --help and with status 2 after whatever is wrong.

    argv: `sys.argv[1:]` when None. prog: how the person called us, for messages.
    """
    return read_config(config_class, argv, prog=prog).config


def read_config(config_class: type[_C], argv: Sequence[str] | None = None, *, prog: str | None = None) -> Resolved[_C]:
    """The same as `parse`, with the origins of all values."""
    parser = build_parser(config_class, prog)
    namespace = vars(parser.parse_args(sys.argv[1:] if argv is None else list(argv)))
    flags = _given_flags(config_class, namespace, parser)
    try:
        file = _config_file(namespace)
    except ConfigError as error:
        parser.error(error.message)
    values, origins = _merge(config_class, flags, file)
    try:
        resolved = Resolved(config_class(**values), origins, file)
    except ValidationError as error:
        parser.error("; ".join(_describe(detail, origins) for detail in error.errors()))
    if message := _clash(resolved):
        parser.error(message)
    return resolved


def _given_flags(config_class: type[Flags], namespace: dict[str, Any], parser: Parser) -> dict[str, Any]:
    given = {name: value for name, value in namespace.items() if name in config_class.model_fields}
    if (first := namespace.get(_POSITIONAL)) is not None and config_class.positional:
        if config_class.positional in given:
            parser.error(f"{first!r} and {flag_name(config_class.positional)} are both given, one is enough")
        given[config_class.positional] = first
    return given


def _config_file(namespace: dict[str, Any]) -> ConfigFile | None:
    path = namespace.get(_CONFIG) or os.environ.get(CONFIG_VARIABLE)
    return read_config_file(Path(path)) if path else None


def _merge(
    config_class: type[Flags], flags: dict[str, Any], file: ConfigFile | None
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """All values that were given, and where; what comes later in here wins."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    if file is not None:
        for name, entry in file.entries_for(config_class).items():
            values[name] = entry.value
            origins[name] = Origin("file", f"{file.path}:{entry.line}", entry.section)
    for name, value in EnvSettingsSource(config_class)().items():
        values[name], origins[name] = value, Origin("environment", ENV_PREFIX + name.upper())
    for name, value in flags.items():
        values[name], origins[name] = value, Origin("flag", flag_name(name))
    return values, origins


# --- flags of a config class --------------------------------------------------------------------------------------


def build_parser(config_class: type[Flags], prog: str | None = None) -> Parser:
    """A parser with one flag for each field; a flag that is not given is absent from its namespace."""
    parser = Parser(
        prog=prog,
        usage=f"%(prog)s {f'[{config_class.positional.upper()}] ' if config_class.positional else ''}[FLAGS]",
        description=(config_class.__doc__ or "").strip(),
        epilog=f"A value comes from its flag, else from the environment (--log-level is {ENV_PREFIX}LOG_LEVEL), else "
        f"from the file of {CONFIG_FLAG}, else it is the default.",
        argument_default=argparse.SUPPRESS,
    )
    if config_class.positional:
        parser.add_argument(
            _POSITIONAL,
            nargs="?",
            default=None,
            metavar=config_class.positional.upper(),
            help=f"same as {flag_name(config_class.positional)}",
        )
    parser.add_argument(CONFIG_FLAG, dest=_CONFIG, metavar="FILE", help="YAML file with values by the names below")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for title, name, field in _titled_fields(config_class):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], name, field)
    return parser


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def to_flags(config: Flags, names: Collection[str]) -> list[str]:
    """The flags that make another process take the same values; only what was given, so defaults stay its own."""
    flags: list[str] = []
    for name in sorted(config.model_fields_set & set(names)):
        value = getattr(config, name)
        if isinstance(value, bool):
            flags.append(flag_name(name) if value else flag_name(f"no_{name}"))
        elif value is not None:
            text = plain_value(value)
            flags += [flag_name(name), ",".join(text) if isinstance(text, list) else str(text)]
    return flags


def plain_value(value: object) -> object:
    """A field's value as a flag or a file would give it; not for secrets."""
    assert not isinstance(value, SecretStr), "a secret is never shown or passed on"
    if isinstance(value, ByteSize):
        return _size_text(value)
    if isinstance(value, tuple | list):
        return [str(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def _size_text(num_bytes: int) -> str:
    """Exact, and with a unit: without one it might count something else."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return f"{int(num_bytes)}B"


def _titled_fields(config_class: type[Flags]) -> list[tuple[str, str, FieldInfo]]:
    """(title, name, field): those of the class itself first, those that every process has last."""
    titled: list[tuple[str, str, FieldInfo]] = []
    seen: set[str] = set()
    for owner in config_class.__mro__:
        for name in inspect.get_annotations(owner):
            if name in config_class.model_fields and name not in seen:
                seen.add(name)
                title = owner.__dict__.get("title", "this process")
                titled.append((title, name, config_class.model_fields[name]))
    return titled


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    annotation = _without_none(field.annotation)
    help_text = (field.description or "").replace("%", "%%") + _default_text(field)
    if annotation is bool:
        group.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=help_text)
    elif get_origin(annotation) is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        group.add_argument(flag_name(name), dest=name, choices=choices, help=help_text)
    else:
        action = "append" if get_origin(annotation) is tuple else "store"
        group.add_argument(
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
    if isinstance(default, ByteSize):
        default = _size_text(default)
    return "" if default in (None, "", []) or field.is_required() else f" (default: {default})"


# --- what is wrong --------------------------------------------------------------------------------------------------


def _describe(detail: ErrorDetails, origins: Mapping[str, Origin]) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if detail["type"].startswith("byte_size"):
        message = "must be a size such as 512MiB or 4GiB"
    if not name:
        return message
    origin = origins.get(name, Origin("flag", flag_name(name)))
    source = f"{origin}: {name}" if origin.kind == "file" else str(origin)
    return f"{source} is {_shown(detail['input'])}: {message[:1].lower()}{message[1:]}"


def _clash(resolved: Resolved[_C]) -> str | None:
    """What stands at the top of a file, where every process would take it, though only one of them can have it."""
    for name in sorted(resolved.config.of_one_process):
        origin, value = resolved.origin(name), getattr(resolved.config, name)
        if origin.kind == "file" and origin.section is None and value:  # port 0 is a different one for each
            sections = " or ".join(f"`{process}: {{{name}: {value}}}`" for process in _processes_with(name))
            return f"{origin}: {name} stands at the top, for all processes, and two cannot share it; write {sections}"
    return None


def _processes_with(name: str) -> list[str]:
    """The single ones: a section of `serve` is for all that it starts."""
    return [process for process in PROCESSES if process != "serve" and name in config_class_of(process).model_fields]


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else repr(value)
