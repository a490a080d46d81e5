"""Which TANDEM_* environment variables mean something, and a word about one that does not: it is probably mistyped.

Only a word, as the prefix may be somebody else's, too. No values: they may be secrets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel

from common.argument_parser import did_you_mean
from common.command_line import CONFIG_VARIABLE, ENV_PREFIX
from common.config_file import PROCESSES, config_class_of

log = logging.getLogger(__name__)

QUIET: Final = {f"{ENV_PREFIX}VARIABLES_CHECKED": "1"}
"""For the environment of a process whose parent has said the word already."""

_NO_FLAGS: Final = {CONFIG_VARIABLE, *QUIET, *(f"{ENV_PREFIX}{name}" for name in ("CACHE_DIR", "ENGINE_DIR"))}
_OF_COMPOSE: Final = {
    f"{ENV_PREFIX}{name}"
    for name in (
        "BASE_IMAGE",
        "DECODE_GPU",
        "MODELS_DIR",
        "NODE_MEMORY",
        "PREFILL_GPU",
        "STOP_GRACE_PERIOD",
        "TAG",
        "TORCH_INDEX",
    )
}


def warn_of_unknown_variables(*config_classes: type[BaseModel]) -> None:
    """Logs one line if there are any. config_classes: whose variables are known beside those of all processes."""
    if QUIET.keys() & os.environ.keys():
        return
    ours = [name for name, value in os.environ.items() if value and name.upper().startswith(ENV_PREFIX)]
    if not ours:
        return
    known = known_variables(config_classes)
    if unknown := sorted(name for name in ours if name.upper() not in known):
        names = "; ".join(f"{name}{did_you_mean(name.upper(), known, prefix=ENV_PREFIX)}" for name in unknown)
        log.warning("set in the environment, but nothing reads it: %s", names)


def known_variables(config_classes: Iterable[type[BaseModel]] = ()) -> set[str]:
    classes = [*map(config_class_of, PROCESSES), *config_classes]
    fields = {f"{ENV_PREFIX}{name.upper()}" for config_class in classes for name in config_class.model_fields}
    return fields | _NO_FLAGS | _OF_COMPOSE
