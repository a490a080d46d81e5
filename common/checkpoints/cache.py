"""The user's cache: directories that are built once, whole or not at all, however many processes ask together.

    lock TARGET.lock -> whole already? -> build in .TARGET.partial -> manifest -> fsync -> rename to TARGET

A process that dies on the way leaves only a .partial, which the next builder clears. The lock is the kernel's
(flock), so it ends with its holder. Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.checkpoints.manifest import find_damage, write_manifest
from common.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """$TANDEM_CACHE_DIR, else `tandem` in $XDG_CACHE_HOME, else ~/.cache/tandem. Raises ConfigError without a home."""
    try:
        if own := os.environ.get("TANDEM_CACHE_DIR"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem"
    except RuntimeError:  # a container may run as a user that nobody has made
        raise ConfigError(
            "no home folder of this user is known for the cache of models; name a folder with TANDEM_CACHE_DIR"
        ) from None


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, complete: built by `build(empty directory)` unless it is whole already.

    A damaged target is named in a warning and built anew. What `build` raises passes through, and leaves no target.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(target.with_name(f"{target.name}.lock")):
            if not _is_whole(target):
                _build(target, build)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    return target


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Held by one process (and one thread) at a time; waits, and says so when it has to."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that prepares %s", path.with_suffix("").name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(target: Path) -> bool:
    if not target.exists():
        return False
    damage = find_damage(target)
    if damage is not None:
        logger.warning("the cached model is damaged and is made again: %s", damage)
    return damage is None


def _build(target: Path, build: Callable[[Path], None]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    _remove(partial)
    partial.mkdir()
    try:
        build(partial)
        write_manifest(partial)
        _sync(partial)
        _remove(target)
        partial.rename(target)
        _fsync(target.parent)
    except BaseException:
        _remove(partial)
        raise


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _sync(directory: Path) -> None:
    """To disk before the rename: after a power loss a name must never stand over missing data."""
    for path in directory.rglob("*"):
        _fsync(path)
    _fsync(directory)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
