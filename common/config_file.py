"""The YAML file of --config: flags by name, for all processes at the top level, for one kind of process in a section.

    model: smollm2-135m-instruct        # - or _ in a name is the same
    max-num-seqs: 32
    decode:                             # only for decode nodes; wins over the top level
      max_num_seqs: 64
    proxy:
      port: 8000                        # only one process can have it, so it stands in a section

A value means what the same text means behind its flag; null is the default. A key that no process has is refused with
its line. Which processes there are is known by dotted name only, so nothing above this module is imported before a
file is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel

from common.argument_parser import did_you_mean
from common.errors import ConfigError

PROCESSES = {
    "serve": "tandem.config:ServeConfig",
    "proxy": "proxy.config:ProxyConfig",
    "prefill": "prefill_node.config:PrefillConfig",
    "decode": "decode_node.config:DecodeConfig",
}
"""The config class of each kind of process; the names are also the sections of a file."""

Value = str | list[str]


@dataclass(frozen=True)
class Entry:
    """One value. section: None for the top level."""

    value: Value
    line: int
    section: str | None


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    sections: dict[str | None, dict[str, Entry]] = field(default_factory=dict)

    def entries_for(self, config_class: type[BaseModel]) -> dict[str, Entry]:
        """By field name, what the file says to a process with this config: its section over the top level."""
        entries = {**self.section(None), **self.section(_process_of(config_class))}
        return {name: entry for name, entry in entries.items() if name in config_class.model_fields}

    def section(self, name: str | None) -> dict[str, Entry]:
        return self.sections.get(name, {})


def config_class_of(process: str) -> type[BaseModel]:
    """Of `serve`, `proxy`, `prefill` or `decode`."""
    module, _, name = PROCESSES[process].partition(":")
    found: type[BaseModel] = getattr(importlib.import_module(module), name)
    return found


def read_config_file(path: Path) -> ConfigFile:
    """Raises ConfigError with file and line when it cannot be read, is no YAML, or has a key that nobody knows."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the config file {path} is no text in UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{path}: no valid YAML for flags: it is nested far too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: no valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return ConfigFile(path)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must be a mapping of flag names to values, such as `max_num_seqs: 32`")
    return ConfigFile(path, _Reader(path).sections(root))


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = {process: set(config_class_of(process).model_fields) for process in PROCESSES}

    def sections(self, root: yaml.MappingNode) -> dict[str | None, dict[str, Entry]]:
        sections: dict[str | None, dict[str, Entry]] = {None: {}}
        for name, key, node in self._items(root):
            if name in PROCESSES and isinstance(node, yaml.MappingNode):
                sections[name] = dict(self._entries(node, name))
            elif name in PROCESSES and _is_null(node):
                sections[name] = {}
            else:
                sections[None].update(self._entry(name, key, node, None))
        return sections

    def _entries(self, root: yaml.MappingNode, section: str) -> Iterator[tuple[str, Entry]]:
        for name, key, node in self._items(root):
            yield from self._entry(name, key, node, section).items()

    def _items(self, root: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """(field name, key, value), each name once: YAML itself would let the last one win without a word."""
        lines: dict[str, int] = {}
        for key, node in root.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key must be the name of a flag")
            name = key.value.removeprefix("--").replace("-", "_")
            if name in lines:
                raise self._error(key, f"{key.value} is given twice, first in line {lines[name]}{self._hint(name)}")
            lines[name] = _line(key)
            yield name, key, node

    def _hint(self, name: str) -> str:
        """Some sections have the name of a value, too, which has to stand in another section beside them."""
        owners = [f"{process}:" for process, names in self._names.items() if name in names]
        return f"; the value goes into {' and '.join(owners)}" if name in PROCESSES else ""

    def _entry(self, name: str, key: yaml.Node, node: yaml.Node, section: str | None) -> dict[str, Entry]:
        self._check_known(name, key, section)
        return {} if _is_null(node) else {name: Entry(self._value(name, node), _line(key), section)}

    def _check_known(self, name: str, key: yaml.Node, section: str | None) -> None:
        known = self._names[section] if section else set().union(*self._names.values())
        if name in known:
            return
        where = f" of {section}" if section else ""
        if owners := [process for process, names in self._names.items() if name in names]:
            hint = f"; it is one of {', '.join(owners)}"
        else:
            hint = did_you_mean(name, known | (set() if section else set(PROCESSES)))
        raise self._error(key, f"unknown key {key.value}{where}{hint}")

    def _value(self, name: str, node: yaml.Node) -> Value:
        """Text as it stands in the file: `on`, 0123 or 1_000 mean the same here as behind a flag."""
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return [str(item.value) for item in node.value]
        raise self._error(node, f"{name} must be a value or a list of values")

    def _error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self._path}:{_line(node)}: {message}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _process_of(config_class: type[BaseModel]) -> str | None:
    place = f"{config_class.__module__}:{config_class.__qualname__}"
    return next((process for process, known in PROCESSES.items() if known == place), None)
